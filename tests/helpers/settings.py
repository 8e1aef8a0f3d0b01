"""Cases of the benchmarks, described and measured once a run of the tests."""

import os

from benchmarks.support.candidates import Setting, make_setting
from benchmarks.support.models import Case
from osdp import Training
from osdp.profiler.cache import MeasurementCache


def setting_of(case: Case, training: Training) -> Setting:
    """``case`` as :func:`benchmarks.support.candidates.make_setting` gives it; its times mean nothing."""
    return make_setting(case, training, cache=MeasurementCache(os.environ["OSDP_CACHE_DIR"]))
