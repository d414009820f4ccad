"""How far the writes of a save are, from the sizes of its temporary files: no writer reports it."""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, walk_files
from trinity_sync.fs.direct_io import measure_written
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.persist import parse_image_name


@dataclass(frozen=True)
class WriteProgress:
    """How far the writes of a save are."""

    nbytes: int | None
    """Size of its images in the memory of this node; None if there are none, as on another node."""
    written_bytes: int
    """Bytes of these images that are written; without any, bytes that all nodes have written."""
    seconds: float
    """Time since the writes began."""

    @property
    def percent(self) -> int | None:
        """Percent of the images that is written; None if their size is unknown."""
        return round(100 * self.written_bytes / self.nbytes) if self.nbytes else None


def measure_progress(
    root: str | Path, run: int, step: int, kind: str, spool: str | Path, since: float
) -> WriteProgress | None:
    """Return how far the writes of a save are; None if nothing tells.

    ``spool`` is the job's folder on this node, and ``since`` is when the writes began, in seconds
    since the epoch.
    """
    tickets = [
        image.ticket
        for image in JobSpool(Path(spool)).read_step(run, step)[0]
        if image.ticket.kind == kind and not image.failed
    ]
    newest: dict[tuple[Path, str, str], tuple[float, int]] = {}  # an attempt may have died
    for path in walk_files(step_folder(root, step), f".*{TEMPORARY_SUFFIX}"):
        file = path.parent, path.name.rsplit(".", 3)[0], parse_image_name(path.name)
        with suppress(OSError):  # the commit has renamed it
            found = path.stat().st_mtime, measure_written(path)
            newest[file] = max(newest.get(file, found), found)
    written: Counter[str] = Counter()
    for (_, _, image), (_, nbytes) in newest.items():
        written[image] += nbytes
    seconds = max(time.time() - since, 0.0)
    if tickets:
        done = sum(min(written[ticket.image], ticket.nbytes) for ticket in tickets)
        return WriteProgress(sum(ticket.nbytes for ticket in tickets), done, seconds)
    return WriteProgress(None, sum(written.values()), seconds) if newest else None
