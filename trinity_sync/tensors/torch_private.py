"""The private names of torch that this package uses, and what each is used for.

torch may rename them without notice. So all are looked up when this module is imported, and the
import of a torch that lacks a name fails with that name, instead of a later save.

`get_spec_and_shard`, `get_storage_id` and `get_change_count` are called for thousands of tensors in
a save, and have the fastest form: a function for two attributes, an ``attrgetter`` for one.
"""

import inspect
import itertools
import pkgutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from trinity_sync.errors import UnsupportedTorchError

OLDEST = "2.10"
"""The oldest torch that the package works with, as in pyproject.toml."""


def look_up(name: str, owner: object = None) -> Any:
    """Return what a private name of torch, with its module and class, stands for.

    ``owner`` has the last part of the name, where neither a module nor a class has it.

    Raises:
        UnsupportedTorchError: this torch lacks the name.
    """
    try:
        if owner is None:
            return pkgutil.resolve_name(name)
        return getattr(owner, name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        minor = ".".join(torch.__version__.split(".")[:2])
        newest = f",<{minor}" if torch.__version__ >= OLDEST else ""  # compares versions
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {name}, which trinity_sync needs; install "
            f"torch>={OLDEST}{newest}"
        ) from error


def _arguments(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**inspect.signature(function).parameters)


def find_attributes(function: Callable[..., Any]) -> SimpleNamespace:
    """Find the attributes that a function reads or sets; some are of instances and no class."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return SimpleNamespace(**dict.fromkeys(code.co_names if code else ()))


# Tensors and storages

for _name in (
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch.UntypedStorage._checkpoint_offset",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._spec",
):
    look_up(_name)


def get_spec_and_shard(tensor: DTensor) -> tuple[Any, torch.Tensor]:
    """Return a DTensor's spec, an object that many share, and this rank's shard, without a copy."""
    return tensor._spec, tensor._local_tensor


get_storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return an identifier of a storage; empty storages have different ones as well."""

get_change_count: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor was changed in place; views share the count."""


def get_shard(value: Any) -> Any:
    """Return this rank's shard of a DTensor without a copy, and any other value as it is."""
    return getattr(value, "_local_tensor", value)


def get_file_offset(storage: torch.UntypedStorage) -> int:
    """Return the byte of the file at which a storage that was loaded without its data starts."""
    offset: Any = storage._checkpoint_offset
    return int(offset)


FakeTensorMode: Callable[[], AbstractContextManager[Any]] = look_up(
    "torch._subclasses.fake_tensor.FakeTensorMode"
)
"""Within it, ``torch.load`` makes tensors without data."""

FakeTensor: type[torch.Tensor] = look_up("torch._subclasses.fake_tensor.FakeTensor")

MAKE_UNSTRIDED = (
    torch.sparse_coo_tensor,
    torch.sparse_compressed_tensor,
    look_up("torch._empty_affine_quantized"),
    look_up("torch._empty_per_channel_affine_quantized"),
    look_up("torch._nested_view_from_buffer"),
)
"""What ``torch.load`` calls for tensors that are not strided, most of which have to have data."""

TorchDispatchMode: Any = look_up("torch.utils._python_dispatch.TorchDispatchMode")
"""Base class of a context within which ``__torch_dispatch__`` sees each operator."""

disable_subclasses: Callable[[], AbstractContextManager[Any]] = look_up(
    "torch._C.DisableTorchFunctionSubclass"
)
"""Within it, attributes of DTensors are read without ``__torch_function__``."""


# Pickles

look_up("torch.TypedStorage._internal", _arguments(torch.TypedStorage))
look_up("torch.TypedStorage._untyped_storage", find_attributes(torch.TypedStorage.__init__))
_rebuild_tensor: Callable[..., torch.Tensor] = look_up("torch._utils._rebuild_tensor_v2")

get_new_dtypes: Callable[[], Collection[torch.dtype]] = look_up("torch.storage._new_dtypes")
"""Return the dtypes whose tensors have a pickle of another form, float8 among them."""


def make_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with a dtype, without a copy and without the deprecation warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def get_untyped_storage(storage: Any) -> torch.UntypedStorage:
    """Return the storage inside a typed one, and any other as it is."""
    found: torch.UntypedStorage = getattr(storage, "_untyped_storage", storage)
    return found


def reduce_plain_tensor(tensor: torch.Tensor) -> Any:
    """Do what ``torch.Tensor.__reduce_ex__`` does for a plain tensor: the form that ``.pt`` has."""
    storage = make_typed_storage(tensor.untyped_storage(), tensor.dtype)
    shape, stride = tuple(tensor.shape), tensor.stride()
    hooks: OrderedDict[Any, Any] = OrderedDict()
    place = (storage, tensor.storage_offset(), shape, stride, tensor.requires_grad, hooks)
    return _rebuild_tensor, place


def replace_shard(slots: Mapping[str, Any], shard: torch.Tensor) -> dict[str, Any]:
    """Return the slots of ``DTensor.__reduce_ex__`` with another shard of the same shape."""
    return {**slots, "_local_tensor": shard}


_DTensorSpec: Any = look_up("torch.distributed.tensor._dtensor_spec.DTensorSpec")

HASHED: tuple[Any, ...] = (_DTensorSpec, DeviceMesh)
"""Types that keep their hash, and compute it where it is None."""

for _type in HASHED:
    look_up(f"{_type.__module__}.{_type.__name__}._hash", find_attributes(_type.__hash__))


def reduce_without_hash(obj: Any) -> Any:
    """Do what ``__reduce_ex__`` does, without the hash, which is another in each process.

    So the images of equal states are equal: a resumed run saves the weights that it has loaded.
    """
    make, arguments, state, *rest = obj.__reduce_ex__(2)
    return make, arguments, {**state, "_hash": None}, *rest


# DTensors without process groups

StridedShard: Any = look_up("torch.distributed.tensor.placement_types._StridedShard")
"""Placement of FSDP2 over a dimension that tensor parallelism has sharded before."""

_compute_shard: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]] = look_up(
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset"
)


def compute_shard_of_coordinate(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets of the shard at a coordinate of a mesh, as DCP computes them.

    ``shape`` is that of the whole tensor; each dimension of the mesh has one placement. The public
    ``compute_local_shape_and_global_offset`` knows the current rank's only.
    """
    with torch.device("cpu"):  # it computes with tensors on the default device
        return _compute_shard(tuple(shape), tuple(mesh_shape), list(coordinate), placements)


# Modules and FSDP

look_up(
    "torch.nn.Module._load_state_dict_post_hooks", find_attributes(torch.nn.Module.__setstate__)
)
_count_users: Callable[[int], int] = look_up("torch._C._storage_Use_Count")


def count_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors have a storage."""
    return _count_users(storage._cdata) - 1  # without the object that was passed


def acts_on_load(module: torch.nn.Module) -> bool:
    """Return whether a module calls hooks once it is loaded, such as to derive what it uses."""
    return any(each._load_state_dict_post_hooks for each in module.modules())


def loads_in_its_own_way(module: torch.nn.Module) -> bool:
    """Return whether a module, but for its parts, changes or reads a state dict by its own code."""
    own = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
    return own or bool(module._load_state_dict_pre_hooks)


look_up(
    "torch.distributed.fsdp.FullyShardedDataParallel._handle",
    find_attributes(look_up("torch.distributed.fsdp._common_utils._FSDPState.__init__")),
)
for _name in (
    "_is_padding_mask",
    "_numels_with_padding",
    "_params",
    "_shared_param_infos",
    "_unpadded_unsharded_size",
):
    look_up(
        f"torch.distributed.fsdp._flat_param.FlatParameter.{_name}",
        SimpleNamespace(
            **look_up("torch.distributed.fsdp._flat_param.FlatParameter.__annotations__")
        ),
    )

FSDP1_WRAPPED: str = look_up("torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE")
"""Name of the module inside an FSDP1 module."""

WRAPPED: tuple[str, ...] = (
    FSDP1_WRAPPED,
    look_up(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE"
    ),
    "_orig_mod",  # of torch.compile, which takes half a second to import: not looked up
)
"""Names of modules inside wrappers; the names of the parameters of the plain model lack them."""


def unwrap_name(name: str) -> str:
    """Return the name that a parameter has in the plain model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def map_plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the given names by those in the plain model, without the names of wrappers.

    These are ``torch.compile``, FSDP1 and activation checkpointing anywhere in a name, and DDP or
    ``DataParallel`` where all names begin with their ``module``.

    Raises:
        ValueError: a name is no text, or two are one in the plain model; the message names them.
    """
    plain: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name of a parameter")
        if (first := plain.setdefault(unwrap_name(name), name)) != name:
            raise ValueError(f"{first} and {name} are one parameter of the plain model")
    while plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): given for name, given in plain.items()}
    return plain


def get_fsdp1_handle(module: Any) -> Any:
    """Return FSDP1's handle of a module with a flat parameter; None for other modules."""
    return getattr(module, "_handle", None)


def get_original_parameters(handle: Any) -> list[tuple[torch.nn.Parameter, int, int]]:
    """Return the parameters in a flat parameter, each with its start and end in it.

    Empty for None and unless ``use_orig_params`` is on, where a flat parameter has gaps for
    alignment.
    """
    flat = getattr(handle, "flat_param", None)
    if flat is None or flat._params is None:
        return []
    ends = list(itertools.accumulate(flat._numels_with_padding))
    spans = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
    kept = [(end - numel, end) for end, numel, is_padding in spans if not is_padding]
    return [(param, *span) for param, span in zip(flat._params, kept, strict=True)]


def get_tied_parameters(flat_parameter: Any) -> Collection[Any]:
    """Return FSDP1's records of tied parameters in a flat parameter; empty for None."""
    found: Collection[Any] = getattr(flat_parameter, "_shared_param_infos", ())
    return found


def get_whole_numel(parameter: Any) -> int | None:
    """Return the number of elements of FSDP1's flat parameter on all ranks; None for others."""
    size: torch.Size | None = getattr(parameter, "_unpadded_unsharded_size", None)
    return None if size is None else size.numel()


# Process groups

if dist.is_gloo_available():
    for _name in ("_devices", "_threads", "_timeout"):
        look_up(f"torch.distributed.ProcessGroupGloo._Options.{_name}")
if dist.is_nccl_available():
    look_up("torch.distributed.ProcessGroupNCCL.Options._timeout")


def make_gloo_options(timeout: timedelta, threads: int) -> Any:
    """Return the options of a gloo group on the default network device."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, threads
    return options


def make_nccl_options(timeout: timedelta) -> Any:
    """Return the options of an NCCL group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
