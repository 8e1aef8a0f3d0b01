"""Execution of a plan: FSDP2 for sharded units, overlapped all-reduces for replicated ones."""

from osdp.runtime.applied import AppliedPlan
from osdp.runtime.apply import apply

__all__ = ["AppliedPlan", "apply"]
