"""Seeds, and a header that says what the tests ran on."""

import os

import pytest
import torch


def pytest_configure() -> None:
    # Tests measure anew, and leave the user's measurements alone; ranks and programs inherit it.
    os.environ["OSDP_CACHE_DIR"] = ""


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"torch {torch.__version__}, device {device}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed of torch's generator at the start of each test."""
    torch.manual_seed(0)
    return 0
