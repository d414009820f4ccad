"""Alarms about the values of a save: compare its files with the last commit, and log what is wrong.

A loop that saves the first step's state for ever, and an optimizer that does not step, commit files
that never change. So the weights and optimizer of each save are compared with those of the newest
commits before it, by the digests in the manifests. An optimizer's file also has plain values, such
as a scheduled learning rate; its tensors count as unchanged if number, norm and largest are equal.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from trinity_sync.errors import TrinitySyncError
from trinity_sync.layout import KINDS
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import (
    COMPARED,
    FileRecord,
    Manifest,
    read_manifest,
    sum_up_health,
)

logger = logging.getLogger(__name__)


def compare_with_last_commit(save: SaveId, files: Sequence[FileRecord]) -> list[FileRecord]:
    """Return the records with the step since which each is unchanged, as of the last commit.

    Each is compared with the newest commit that has its file, of the two that the latest pointers
    name. Call it under the commit lock, before they are updated.
    """
    frozen = {*read_job_settings(save.root).frozen.split(",")}
    left = {
        file.path: file
        for file in files
        if file.component in COMPARED
        and not {file.role, f"{file.role}/{file.component}"} & frozen
        and not (file.component == "optim" and file.health and not file.health.tensors)  # as SGD's
    }
    since: dict[str, int | None] = {}
    for before in list_commits_before(save) if left else ():
        for known in before.files:
            if (now := left.pop(known.path, None)) and _is_unchanged(known, now):
                is_first = known.unchanged_since is None
                since[known.path] = before.step if is_first else known.unchanged_since
    return [replace(each, unchanged_since=since.get(each.path)) for each in files]


def list_commits_before(save: SaveId, ranks: Collection[int] | None = None) -> list[Manifest]:
    """Return the commits of earlier steps that the latest pointers name, the newest first.

    ``ranks`` are as in `read_manifest`.
    """
    found = {}
    for kind in KINDS:
        try:
            step = read_latest_pointer(save.root, kind)
            if step is not None and step < save.step and step not in found:
                found[step] = read_manifest(save.root, step, ranks=ranks)
        except (TrinitySyncError, OSError) as error:  # of a step that is corrupted, and reported
            logger.info("%s is not compared with the %s before: %s", save, kind, error)
    return [manifest for _, manifest in sorted(found.items(), reverse=True) if manifest]


def _is_unchanged(before: FileRecord, now: FileRecord) -> bool:
    if before.digest == now.digest:
        return True
    values = now.health
    return now.component == "optim" and bool(values and values.norm) and before.health == values


def log_alarms(save: SaveId, files: Sequence[FileRecord]) -> None:
    """Log what is wrong with the values of files that a save has just committed."""
    for each in sum_up_health(files):
        for problem in each.problems:
            logger.warning("%s is committed, but %s", save, problem)
