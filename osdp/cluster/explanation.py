"""ClusterReport: what is known about the choice of a cluster plan, and which plans are ties."""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, Workload


@dataclass(frozen=True, slots=True)
class ClusterAlternative:
    """The best layout that decides one thing otherwise than the chosen plan.

    Attributes:
        decision: Name of the decision, a field of :class:`osdp.cluster.search.space.LayoutSpace`.
        plan: The layout, on the same nodes; ``None`` if none fits.
    """

    decision: str
    plan: ClusterPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """A chosen plan, and what it was chosen from.

    Attributes:
        plan: The chosen plan.
        listed: Plans of the table, best first.
        front: Plans that no other plan beats in both time and cost, fastest first.
        all_parts: Whether the front is that of all parts of the cluster; otherwise nodes were left out by
            halves.
        alternatives: What other decisions would bring.
        cluster: The cluster.
        workload: Model and batch.
        goal: What was asked for, as the end of "the plan is ...".
        candidates: Number of layouts in the space.
        basis: Assumptions of the estimates.
        steps: Steps of the whole training; ``None`` if unknown.
        certain: Whether only layouts that are certain to fit were taken.
    """

    plan: ClusterPlan
    listed: tuple[ClusterPlan, ...]
    front: tuple[ClusterPlan, ...]
    all_parts: bool
    alternatives: tuple[ClusterAlternative, ...]
    cluster: Cluster
    workload: Workload
    goal: str
    candidates: int
    basis: str
    steps: int | None = None
    certain: bool = False

    @property
    def priced(self) -> bool:
        """Whether costs are in dollars; otherwise the front is one of time and number of devices."""
        return not self.cluster.unpriced

    def cost(self, plan: ClusterPlan) -> float:
        """Cost of a plan on the front: dollars of a step, or its number of devices."""
        dollars = plan.dollars_per_step if self.priced else None
        return plan.layout.world_size if dollars is None else dollars


def ties(plans: Sequence[ClusterPlan]) -> tuple[int, ...]:
    """Indices of the plans whose seconds cannot be told apart from the first one's, that one included.

    Args:
        plans: Plans of one workload, best first.
    """
    best = plans[0]
    return tuple(
        index
        for index, plan in enumerate(plans)
        if plan is best
        or (plan.fits and best.spread.alike(plan.spread, plan.step_seconds / best.step_seconds))
    )


def worth_measuring(plans: Sequence[ClusterPlan], number: int = 3) -> tuple[int, ...]:
    """Indices of the ties that a measurement should decide between; empty if the first plan is alone.

    Layouts of other degrees come first: what is wrong with the prediction of one is not with the other's.

    Args:
        plans: Plans of one workload, best first.
        number: Number of plans at most.
    """
    tied = ties(plans)
    if len(tied) < 2:
        return ()
    first = {plans[index].layout.degrees: index for index in reversed(tied)}
    others = [index for index in tied if index not in first.values()]
    return tuple(sorted([*sorted(first.values()), *others][:number]))
