"""``root/.trinity_sync/saves.jsonl``: a line for each committed save, also of steps removed since.

Retention removes manifests; the log keeps what a report needs to show that saves become slower. It
is best effort: a crash may lose its last line. It also tells a retry that its step was removed.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from trinity_sync.errors import SaveError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import Count, Seconds
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.save_timing import SaveTiming

MAX_BYTES = 4 << 20
"""Size in bytes beyond which the older half of the log is dropped."""


@dataclass(frozen=True)
class LoggedSave:
    """A committed save."""

    run: Count
    step: Count
    committed_at: Seconds
    """Seconds since the epoch."""
    timing: SaveTiming


def append_save(root: str | Path, manifest: Manifest) -> None:
    """Log the newest save of a manifest. Call it under the commit lock.

    Raises:
        OSError: the log cannot be written.
    """
    path = _path(root)
    entry = LoggedSave(
        manifest.run, manifest.step, manifest.committed_at, timing=manifest.timings[-1]
    )
    if path.exists() and path.stat().st_size > MAX_BYTES:
        lines = path.read_bytes().splitlines(keepends=True)
        replace_file(path, b"".join(lines[len(lines) // 2 :]), sync=False)
    line = json.dumps(asdict(entry)) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def read_saves(root: str | Path) -> Sequence[LoggedSave]:
    """Return the logged saves, oldest first, each once; lines that are torn are skipped."""
    try:
        lines = _path(root).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: dict[tuple[object, ...], LoggedSave] = {}
    for line in lines:
        with suppress(ValueError):
            each = msgspec.convert(json.loads(line), LoggedSave)
            # a flow run that is retried after its commit logs the save again
            save = (each.run, each.step, each.timing.kind, each.timing.roles)
            found.setdefault(save, each)
    return list(found.values())


def refuse_removed(save: SaveId) -> None:
    """Refuse to wait for the images of a save that was committed and whose step is gone.

    Call it if neither images nor a manifest of the save are left.

    Raises:
        SaveError: the log has it.
    """
    for each in read_saves(save.root):
        logged = (each.run, each.step, each.timing.kind, each.timing.roles)
        if logged == (save.run, save.step, save.kind, save.roles):
            at = datetime.fromtimestamp(each.committed_at, timezone.utc)
            raise SaveError(
                f"{save} was committed at {at:%Y-%m-%d %H:%M:%S} UTC, and the step has been "
                "removed or replaced since, so nothing is left to save. Do not retry it."
            )


def _path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "saves.jsonl"
