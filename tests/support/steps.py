"""Committed steps of small files, without a training."""

import os
from pathlib import Path
from typing import Any

from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.layout import ITERATION_FILES, SERVES_AS, Kind, step_folder
from trinity_sync.retention.policies import StepInfo
from trinity_sync.storage.discovery import latest_pointer_covers, read_latest_pointer
from trinity_sync.storage.manifest import FileRecord, Manifest, write_manifest

MODEL = "actor/model_world_size_1_rank_0.pt"


def commit_files(
    root: Path,
    step: int,
    *,
    run: int = 1,
    kind: Kind = "checkpoint",
    nbytes: int = 1000,
    at: float | None = None,
    pointer: bool = True,
    optim: bool = False,
    **fields: Any,
) -> Path:
    """Commit a step of a model and a folder of metadata; returns the step's folder.

    With ``optim``, the model has an optimizer. ``fields`` are further ones of its manifest.
    """
    folder = step_folder(root, step)
    records = []
    contents = {MODEL: os.urandom(nbytes), "actor/huggingface/config.json": b"{}"}
    contents |= {MODEL.replace("model", "optim"): os.urandom(nbytes)} if optim else {}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        digest = digest_cached_file(folder / path)
        shard = path.partition("/")[2].partition("_world")
        component = shard[0] if shard[1] else "metadata"
        records.append(FileRecord(path, len(content), digest, "actor", component, 0, 1))
    at = 1.7e9 + step if at is None else at
    manifest = Manifest("job", run, step, SERVES_AS[kind], tuple(records), (), at, **fields)
    write_manifest(root, manifest)
    if pointer:
        for served in SERVES_AS[kind]:
            named = read_latest_pointer(root, served)
            if not latest_pointer_covers(root, served, run, step, named):
                (root / ITERATION_FILES[served]).write_text(str(step))
    return folder


def save_foreign_step(root: Path, step: int) -> dict[str, bytes]:
    """Save a step as veRL does by itself, before the next run begins; returns its files."""
    folder = step_folder(root, step)
    content = {name: name.encode() for name in (MODEL, "actor/extra_state.pt", "data.pt")}
    for name, of in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(of)
    probe, written = root / "probe", (folder / name).stat().st_ctime
    while probe.touch() or probe.stat().st_ctime <= written:
        pass  # until the clock of the file system goes on
    return content


def info(step: int, **other: Any) -> StepInfo:
    """What a policy sees of a checkpoint that was committed ``step`` seconds into the epoch."""
    fields = {"run": 1, "kinds": SERVES_AS["checkpoint"], "committed_at": float(step), "nbytes": 1}
    return StepInfo(step, **{**fields, **other})
