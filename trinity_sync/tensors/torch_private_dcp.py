"""The private names of DCP, as `torch_private` has those of all else.

They are apart because PyTorch's optimizers import the rest of torch, and no plain training DCP.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from trinity_sync.tensors.torch_private import find_attributes, look_up

DCP_INDEX_CLASSES: Mapping[str, Collection[str]] = {
    "torch.distributed.checkpoint.metadata": ["_MEM_FORMAT_ENCODING"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
}
"""Names that the index of a DCP checkpoint needs in its unpickler, by module."""

for _module, _names in DCP_INDEX_CLASSES.items():
    for _name in _names:
        look_up(f"{_module}.{_name}")


make_dcp_place: Callable[[str, int, int], Any] = look_up(
    "torch.distributed.checkpoint.filesystem._StorageInfo"
)
"""Return what the index of a DCP checkpoint says of an item: its file, offset and length."""

look_up(
    "torch.distributed.checkpoint.default_planner.DefaultSavePlanner._enable_plan_caching",
    find_attributes(look_up("torch.distributed.checkpoint.DefaultSavePlanner.__init__")),
)


def disable_plan_cache(planner: Any) -> None:
    """Have a save planner of DCP return each plan, and not an empty one for a plan it knows.

    DCP has one cache for all planners of a class, and so for all states of a process.
    """
    if hasattr(planner, "_enable_plan_caching"):
        planner._enable_plan_caching = False
