"""Committed steps of small files, without a training."""

import os
from pathlib import Path
from typing import Any

from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.layout import SERVES_AS, Kind, step_folder
from trinity_sync.retention.policies import StepInfo
from trinity_sync.storage.latest_pointer import advance_latest_pointer
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
    **fields: Any,
) -> Path:
    """Commit a step of a model and a folder of metadata; returns the step's folder.

    ``fields`` are further ones of its manifest.
    """
    folder = step_folder(root, step)
    records = []
    for path, content in ((MODEL, os.urandom(nbytes)), ("actor/huggingface/config.json", b"{}")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        digest = digest_cached_file(folder / path)
        component = "model" if path == MODEL else "metadata"
        records.append(FileRecord(path, len(content), digest, "actor", component, 0, 1))
    at = 1.7e9 + step if at is None else at
    manifest = Manifest("job", run, step, SERVES_AS[kind], tuple(records), (), at, **fields)
    write_manifest(root, manifest)
    if pointer:
        for served in SERVES_AS[kind]:
            advance_latest_pointer(root, served, run, step)
    return folder


def info(step: int, **other: Any) -> StepInfo:
    """What a policy sees of a checkpoint that was committed ``step`` seconds into the epoch."""
    fields = {"run": 1, "kinds": SERVES_AS["checkpoint"], "committed_at": float(step), "nbytes": 1}
    return StepInfo(step, **{**fields, **other})
