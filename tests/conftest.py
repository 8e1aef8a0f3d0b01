"""Seeds, and a header that says what the tests ran on."""

import gc
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.helpers.load import slowdown


def pytest_configure(config: pytest.Config) -> None:
    """Devices and models are measured once a run, and the user's measurements are left alone."""
    # No test measures time: examples may take as long as a loaded machine needs.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="osdp-measured-")
        config.add_cleanup(folder.cleanup)
        # Workers of pytest-xdist, ranks and programs inherit it.
        os.environ["OSDP_CACHE_DIR"] = folder.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: one that begins last would be waited for by workers that have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish() -> None:
    """What was loaded stays: no collection of garbage walks through it, and there are fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"torch {torch.__version__}, device {device}, {torch.get_num_threads()} threads"


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limits are for an idle machine."""
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(seconds * slowdown()), append=False)
    yield


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed of torch's generator at the start of each test."""
    torch.manual_seed(0)
    return 0
