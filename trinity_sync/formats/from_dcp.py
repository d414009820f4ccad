"""Conversion of a DCP checkpoint to a committed step of FSDP2 ranks.

One rank's part of one component is in memory at a time: PyTorch plans which chunks of the
checkpoint it needs; it is read, written and freed. Then the step is committed like any other.
"""

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import CommitError, ConfigError, SaveError
from trinity_sync.formats.dcp_local import run_dcp_alone
from trinity_sync.formats.dcp_source import DcpReader
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import check_name, shard_file, step_folder
from trinity_sync.snapshot.job_identity import open_identity
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.commit import commit
from trinity_sync.storage.manifest import Manifest, read_run_manifest
from trinity_sync.storage.manifest_files import FileRecord
from trinity_sync.storage.persist import make_attempt_path, read_file_identity
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.save import Written, discard


def from_dcp(
    folder: str | Path,
    root: str | Path,
    step: int,
    *,
    world_size: int,
    role: str = "actor",
    model: str = "model",
    optim: str = "optim",
    device_type: str = "cuda",
    whole: Sequence[str] = (),
    metadata: str | Path | None = None,
    on_progress: OnProgress = no_progress,
) -> Manifest:
    """Commit a step with the state of a DCP checkpoint, sharded over ``world_size`` ranks.

    Tensors are split along their first dimension, as ``fully_shard`` does; scalars are not split.
    veRL's loader reads the step with as many ranks, ``FSDPCheckpointManager`` with any number; both
    without ``extra`` in ``checkpoint.load_contents``, which DCP checkpoints do not contain.

    Args:
        folder: folder of the checkpoint.
        root: a job's root, of which no training is running; created if it is missing.
        step: number of the new step.
        world_size: number of ranks that are to load it.
        role: role of the state.
        model: key of the model in the saved state; empty if its tensors are at the top.
        optim: key of the optimizer, in the form of ``optimizer.state_dict()`` or of
            ``torch.distributed.checkpoint.state_dict``; empty to leave it out.
        device_type: device type of the ranks' mesh; DTensors of another type do not load.
        whole: patterns of names of model tensors that are not sharded, i.e. buffers.
        metadata: folder with ``fsdp_config.json`` and ``huggingface/``, for veRL's merger.
        on_progress: called with shards that were written and their total.

    Raises:
        ConfigError: the folder is not a DCP checkpoint, has no such state or more than tensors and
            plain values, or an argument is invalid.
        CommitError: the job has such a step, or the checkpoint is corrupted.
        SaveError: the step cannot be written; nothing is left of it.
    """
    check_name("role", role)
    if world_size < 1 or step < 0:
        raise ConfigError(
            f"step must be at least 0, got {step}, and world_size at least 1, got {world_size}"
        )
    source, base = DcpReader(Path(folder)), Path(root).resolve()
    parts = {
        "model": source.select_entries(model, without=optim),
        "optim": source.select_entries(optim) if optim else {},
    }
    if not parts["model"]:
        top = dict.fromkeys(str(path[0]) for path in source.paths.values())
        raise ConfigError(
            f"{folder} has no tensors under {model!r} (at its top: {', '.join([*top][:8])}); "
            "pass the key of the model, '' for none (--model)"
        )
    source.require_optimizer(parts["optim"])
    parts = {name: paths for name, paths in parts.items() if paths}
    if step_folder(base, step).exists():
        raise CommitError(
            f"{step_folder(base, step)} exists already and is not changed; choose another step or "
            "another root"
        )
    make_folder(base)
    identity = open_identity(base)
    run = find_newest_run(base) or open_run(base, f"from-dcp-{uuid.uuid4().hex}", 0)
    where = str(base), run.number, run.key
    save = SaveId(*where, step, "checkpoint", (role,), identity=identity)
    shards = [(name, rank) for name in parts for rank in range(world_size)]
    small = _read_metadata_files(Path(metadata)) if metadata else {}
    components = (*parts, *(["metadata"] if small else []))
    written: list[Written] = []
    try:
        for name, content in small.items():
            record = FileRecord(f"{role}/{name}", 0, "", role, "metadata", 0, world_size)
            written.append(_write(save, record, content, components))
        for name, rank in shards:
            state = source.read_component(parts[name], rank, world_size, device_type, whole, name)
            path = f"{role}/{shard_file(name, world_size, rank)}"
            record = FileRecord(path, 0, "", role, name, rank, world_size)
            written.append(_write(save, record, state, components))
            on_progress(1, len(shards))
        return commit(save, written)
    except OSError as error:
        raise SaveError(
            f"{save} is not committed: {error.filename or save.folder} cannot be written: "
            f"{error.strerror}. Nothing is left of it; repair that and retry."
        ) from error
    finally:
        _remove_uncommitted(save, written)


def _write(save: SaveId, record: FileRecord, content: Any, components: tuple[str, ...]) -> Written:
    """Write a state, or bytes, under a temporary name, durably."""
    final, attempt, image = save.folder / record.path, uuid.uuid4().hex[:8], uuid.uuid4().hex
    make_folder(final.parent)
    temporary = make_attempt_path(final, attempt, image)
    try:
        with run_dcp_alone(), temporary.open("xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)
    return Written(
        replace(record, nbytes=temporary.stat().st_size, digest=digest_cached_file(temporary)),
        temporary=os.fspath(temporary),
        identity=read_file_identity(temporary),
        components=components,
        seconds=0.0,
    )


def _read_metadata_files(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with fsdp_config.json and huggingface/")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(files)}


def _remove_uncommitted(save: SaveId, written: Sequence[Written]) -> None:
    """Remove the files of a failed conversion; none after a commit."""
    if read_run_manifest(save.root, save.run, save.step):
        return
    discard(written)
    for file in written:
        (save.folder / file.record.path).unlink(missing_ok=True)
    for folder in (*sorted(save.folder.rglob("*"), reverse=True), save.folder):
        with suppress(OSError):  # not empty, or not a folder
            folder.rmdir()
