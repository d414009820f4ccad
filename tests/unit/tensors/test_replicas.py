"""Which ranks have the same shards, wherever in a state these are."""

from typing import Any

import pytest
import torch

from tests.support.dtensors import make_dtensor, make_mesh
from trinity_sync.tensors.dtensors import find_replicas


@pytest.mark.parametrize("nest", [lambda w: {"w": w}, lambda w: [{"w": w}], lambda w: {"a": (w,)}])
def test_shards_are_found_in_lists_as_well(nest: Any) -> None:
    """As of several optimizers: rank 0 would save its shards alone, for all."""
    shard = make_dtensor(torch.ones(3), make_mesh("cpu", 1, 2), torch.Size([6]))
    assert find_replicas([nest(shard)], 1) == (1,)
    assert find_replicas([nest(torch.ones(3))], 1) == ()
