"""Replicated parameters: what tells their values from others."""

import pytest
import torch

from osdp.runtime.sharding.replicated import _checksum

LAYOUTS = {
    "transposed": torch.empty(8192, 3).t(),
    "transposed matrices": torch.empty(4, 8192, 3).mT,
    "channels last": torch.empty(8, 64, 3, 3).to(memory_format=torch.channels_last),
    "a number": torch.empty(()),
    "empty": torch.empty(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checksum_is_of_values_however_they_lie(layout: str) -> None:
    """Of a row of a transposed weight there was none, and the first backward ended with an error."""
    values = torch.randn(LAYOUTS[layout].shape, generator=torch.Generator().manual_seed(0))
    lies = torch.empty_like(LAYOUTS[layout]).copy_(values)
    assert lies.stride() == LAYOUTS[layout].stride()
    assert int(_checksum(lies)) == int(_checksum(values))
    if lies.numel():
        assert int(_checksum(lies)) != int(_checksum(values + 1))
