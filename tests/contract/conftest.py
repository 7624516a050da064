"""What the tests of the contract share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Ends the group that doors over processes make."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
