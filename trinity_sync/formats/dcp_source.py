"""Reader of a DCP checkpoint, which returns the part of one rank at a time.

The checkpoint is not trusted. Its index is unpickled with PyTorch's own index classes only, its
values with ``weights_only``, and the files that it names must be below its folder.
"""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.tensors.dtensor_shards import compute_chunk
from trinity_sync.tensors.safe_load import allow_plain
from trinity_sync.tensors.torch_private import make_dtensor
from trinity_sync.tensors.torch_private_dcp import DCP_INDEX_CLASSES, unflatten_state_dict
from trinity_sync.tensors.unshard import join_keys

Paths = Mapping[str, tuple[Any, ...]]
"""Path of each entry in the saved state, by name of the entry."""

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch": {"Size", *(str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}
"""Classes allowed in the index of a checkpoint."""


class DcpReader(FileSystemReader):
    """A DCP checkpoint in a folder.

    Raises:
        ConfigError: the folder is not a DCP checkpoint, or its index cannot be trusted.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.metadata = self.read_metadata()
        self.paths: Paths = self.metadata.planner_data or {
            name: (name,) for name in self.metadata.state_dict_metadata
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, without trust; the arguments, which DCP passes, are ignored."""
        path = self.folder / ".metadata"
        try:
            metadata = parse_index(path.read_bytes(), path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{self.folder} is no DCP checkpoint: it has no .metadata. Pass the folder that "
                "was passed to dcp.save."
            ) from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        for stored in (metadata.storage_data or {}).values():
            stored_at = (self.folder / stored.relative_path).resolve()
            if not stored_at.is_relative_to(self.folder.resolve()):
                raise ConfigError(
                    f"{path} names {stored.relative_path}, which is outside of its folder; do "
                    "not trust this checkpoint"
                )
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def find_key(self, key: str) -> tuple[Any, ...] | None:
        """Return the path of a key of the saved state: at its top, or in one other object alone.

        A key has dots between the keys of nested objects. None if there is no such key, or several.
        """
        parts = tuple(key.split("."))
        found = {
            path[: at + len(parts)]
            for path in self.paths.values()
            for at in range(2)
            if tuple(map(str, path[at : at + len(parts)])) == parts and len(path) > at + len(parts)
        }
        return min(found, key=len) if {parts} & found or len(found) == 1 else None

    def select_entries(
        self, prefix: tuple[Any, ...], *, without: tuple[Any, ...] | None = None
    ) -> Paths:
        """Return the entries below a path in the saved state, but those below another one."""
        return {
            name: path[len(prefix) :]
            for name, path in self.paths.items()
            if path[: len(prefix)] == prefix
            and (without is None or path[: len(without)] != without)
        }

    def require_optimizer(self, paths: Paths) -> None:
        """Require that entries have the form of an optimizer's state dict.

        Raises:
            ConfigError: they do not.
        """
        for path in paths.values():
            if len(path) != 3 or path[0] not in ("state", "param_groups"):
                raise ConfigError(
                    f"{join_keys(path)} in {self.folder} is not in the form of "
                    "optimizer.state_dict() or get_optimizer_state_dict(); leave the optimizer "
                    "out (--optim '')"
                )

    def read_component(
        self, paths: Paths, rank: int, mesh: DeviceMesh | None, whole: Sequence[str], component: str
    ) -> dict[str, Any]:
        """Return a rank's state of ``model`` or ``optim``: FSDP2's on a mesh, otherwise the whole.

        ``paths`` are the entries of the component. Model tensors whose names match a pattern in
        ``whole`` are not sharded.
        """
        flat: dict[str, Any] = {}
        for name, path in paths.items():
            meta = self.metadata.state_dict_metadata[name]
            replicated = component == "model" and any(
                fnmatch(join_keys(path), each) for each in whole
            )
            flat[name] = None  # replaced by a plain value
            if isinstance(meta, TensorStorageMetadata):
                flat[name] = _allocate_part(meta, mesh, rank, replicated=replicated)
        planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with run_dcp_alone():
                load(flat, storage_reader=self, planner=planner, no_dist=True)
        except ConfigError:
            raise
        except Exception as error:  # PyTorch may raise anything for a torn or missing file
            raise CommitError(
                f"{self.folder} is corrupted or incomplete: {error!r}; choose another checkpoint"
            ) from error
        state = unflatten_state_dict(flat, dict(paths))
        return state if component == "model" else _number_parameters(state)


def parse_index(content: bytes, path: Path) -> Metadata:
    """Return the index of a DCP checkpoint from the content of its file, without trust.

    Raises:
        ConfigError: it is not an index, or cannot be trusted.
    """
    try:
        metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # a torn or foreign pickle may raise anything
        raise ConfigError(
            f"{path} is not the index of a DCP checkpoint, and was not trusted: {error}"
        ) from error
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # Python 3.13 pickles pathlib's classes by it
        known = *_INDEX_CLASSES.get(module, ()), *DCP_INDEX_CLASSES.get(module, ())
        if name not in known:
            raise pickle.UnpicklingError(f"it imports {module}.{name}, which no index needs")
        return super().find_class(module, name)


class _PlainPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        allow_plain()
        try:
            found = torch.load(value, map_location="cpu", mmap=False, weights_only=True)
            self.state_dict[name] = found
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{name} of the checkpoint is more than tensors and plain values, and was not "
                f"unpickled ({error}); save the checkpoint without it, or leave the optimizer out "
                "(--optim '')"
            ) from error


def _allocate_part(
    meta: TensorStorageMetadata, mesh: DeviceMesh | None, rank: int, *, replicated: bool
) -> torch.Tensor:
    """Allocate a rank's part of a tensor, sharded as `fully_shard` does."""
    size, dtype = meta.size, meta.properties.dtype
    if mesh is None or replicated or not size:
        return torch.empty(size, dtype=dtype, device="cpu")
    _, length = compute_chunk(size[0], mesh.size(), rank)
    local = torch.empty((length, *size[1:]), dtype=dtype, device="cpu")
    return make_dtensor(local, mesh, size)


def _number_parameters(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer state with parameters numbered in group order, as optimizers save it."""
    groups = optimizer.get("param_groups", [])
    names = [str(name) for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = optimizer.get("state", {})
    if unknown := [name for name in state if name not in numbers]:
        raise ConfigError(
            f"the optimizer has state for {unknown[0]}, which is in none of its param_groups; "
            "leave the optimizer out (--optim '')"
        )
    return {
        "state": {numbers[name]: state[name] for name in names if name in state},
        "param_groups": [
            {**group, "params": [numbers[str(name)] for name in group["params"]]}
            for group in groups
        ],
    }


@contextmanager
def run_dcp_alone() -> Iterator[None]:
    """Run DCP within the block without a process group, and raise the original errors.

    DCP warns that there is no process group, wraps the errors of ranks, and finishes a file after
    the disk refused a write, which hides the cause.
    """
    with warnings.catch_warnings(), torch.device("cpu"):  # DCP computes on the default device
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            first: BaseException = error
            if isinstance(error, CheckpointException):
                first = next(iter(error.failures.values()))[0]
            raise _find_os_error(first) or first from error


def _find_os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
