"""Storage reader of DCP for a committed step: leased, compared with its digests, then read."""

import io
import os
import pickle
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import check_name, check_number, step_folder
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.manifest import FileRecord, Manifest
from trinity_sync.storage.restore import OpenFiles, load_bytes
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.tensors.torch_private_dcp import DCP_INDEX_CLASSES

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


class StepReader(FileSystemReader):
    """DCP's storage reader of a step that `StepWriter` saved, for any mesh and number of ranks.

    Each rank leases the step until it has read. It opens the files that it reads from, and compares
    them with their digests before any rank loads a byte; what is read is what was compared. Errors
    are DCP's ``CheckpointException``, on all ranks, with the errors below by rank. After an error,
    the lease may last until the reader is used again or deleted.

    Args:
        root: the job's root.
        step: a committed step.
        role: role of the states.

    Raises:
        ConfigError: the step or the role is invalid.
        CommitError: in ``dcp.load``: the step is not committed, is corrupted or replaced meanwhile,
            was not saved with DCP, or has pickles of another user.

    Example::

        dcp.load(state, storage_reader=StepReader("ckpts", 40))
        saves.resumed_from(40)
    """

    def __init__(self, root: str | Path, step: int, *, role: str = "actor") -> None:
        self._root, self._step = Path(root), check_number("step", step)
        self._role = check_name("role", role)
        super().__init__(step_folder(root, step) / role)
        self._leased = ExitStack()
        self._manifest: Manifest | None = None
        self._records: dict[str, FileRecord] = {}
        self._failure: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another place than the step.

        Raises:
            ConfigError: there is a checkpoint id.
        """
        if checkpoint_id is not None:
            raise ConfigError(
                f"step {self._step}: a checkpoint_id was passed, {checkpoint_id!s}; leave it out, "
                "the reader has the root and the step"
            )

    def read_metadata(self) -> Metadata:
        """Lease the step, and return its index.

        Errors are raised by `set_up_storage_reader`: DCP would only log them. Nothing remains of an
        earlier load that DCP has not finished.
        """
        self._leased.close()
        self._failure = None
        try:
            metadata = self._read_index()
        except Exception as error:
            self._leased.close()
            self._failure = error
            metadata = Metadata({}, storage_data={})
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the index.

        Raises:
            CommitError: the step cannot be read.
        """
        if self._failure:
            raise self._failure
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Compare the files that this rank reads from with their digests.

        Raises:
            CommitError: a file is corrupted, or is another user's and has pickles.
        """
        pickles: dict[str, bool] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            is_pickle = item.type == LoadItemType.BYTE_IO
            pickles[name] = pickles.get(name, False) or is_pickle
        assert self._manifest
        try:
            files = self._leased.enter_context(OpenFiles(self._root, self._manifest))
            for name, has_pickles in sorted(pickles.items()):
                files.open([self._records[name]], unpickled=has_pickles)
            files.compare(self._records[name] for name in pickles)
        except BaseException:
            self._leased.close()
            raise
        self.fs = _Opened({name: files.get_path(self._records[name].path) for name in pickles})
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's slices into the tensors of the state, and release the step.

        Raises:
            CommitError: another run has replaced the step meanwhile; what was read is the old one.
        """
        assert self._manifest
        with self._leased.pop_all():
            read = super().read_data(plan, planner)
        require_unreplaced(self._root, self._manifest)
        return read

    def _read_index(self) -> Metadata:
        lease = lease_to_read(self._root, self._step, f"dcp.load of {self._role}")
        manifest = self._manifest = self._leased.enter_context(lease)
        self._records = {
            PurePosixPath(record.path).name: record
            for record in manifest.files
            if (record.role, record.component) == (self._role, "dcp")
        }
        path = f"{self._role}/.metadata"
        if not self._records or manifest.find_file(path) is None:
            has = ", ".join(manifest.roles) or "none"
            raise CommitError(
                f"step {self._step} in {self._root} has no DCP state of role {self._role} (roles: "
                f"{has}). What CheckpointCoordinator.save has written is loaded by its load, and "
                "converted by: trinity-sync export dcp"
            )
        content = load_bytes(self._root, self._step, path, manifest=manifest)
        metadata = parse_index(content, Path(self.path) / ".metadata")
        named = {stored.relative_path for stored in (metadata.storage_data or {}).values()}
        if lacking := named - self._records.keys():
            raise CommitError(
                f"{path} of step {self._step} in {self._root} names {min(lacking)}, which is not "
                "part of the step; load another step"
            )
        return metadata


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


class _Opened(FileSystem):
    """Files that are open already; ``paths`` are those of the open files, by name in the index."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        """Return the path of an open file, wherever DCP looks for its name."""
        return self._paths[suffix]
