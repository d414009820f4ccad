"""``global_step_N/corrupted.json``: the corruption mark of a verification.

It lists the corrupted files and the time of the verification; the files are not changed. A marked
step counts as not loadable everywhere, until a verification finds it valid again, e.g. after the
files were restored from a copy.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import replace_file, sync_folder
from trinity_sync.fs.records import STACK, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import CORRUPTION_MARK, ROOT_FORMAT, step_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corruption(Record, format=ROOT_FORMAT, writer=STACK):
    """The corrupted files of a step, with reasons."""

    files: dict[str, str]
    """Reason by path below the step's folder."""
    verified_at: Seconds
    """Time of the verification, in seconds since the epoch."""

    def __str__(self) -> str:
        named = [f"{path} {wrong}" for path, wrong in sorted(self.files.items())]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        at = datetime.fromtimestamp(self.verified_at).astimezone().isoformat(timespec="seconds")
        return f"{'; '.join(named[:3])}{more}, verified at {at}"


def read_corruption(root: str | Path, step: int) -> Corruption | None:
    """Return the corruption mark of a step, or None; a mark that cannot be read still counts."""
    path = step_folder(root, step) / CORRUPTION_MARK
    try:
        return decode_record(Corruption, path.read_bytes(), path)
    except FormatError as error:
        return Corruption(
            {CORRUPTION_MARK: f"was written by another release: {error}"}, path.lstat().st_mtime
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError):
        return Corruption({CORRUPTION_MARK: "is torn or edited"}, path.lstat().st_mtime)


def require_readable_mark(root: str | Path, step: int) -> None:
    """Require that the corruption mark of a step, if any, can be read by this release.

    Raises:
        FormatError: another release has written it.
    """
    path = step_folder(root, step) / CORRUPTION_MARK
    with suppress(ValueError, OSError):
        decode_record(Corruption, path.read_bytes(), path)


def mark_corrupted(root: str | Path, step: int, corruption: Corruption) -> None:
    """Mark a step as corrupted, durably.

    Call it under the commit lock, and repair the latest pointers afterwards.
    """
    replace_file(step_folder(root, step) / CORRUPTION_MARK, encode_record(corruption, indent=1))
    logger.error("step %d in %s is corrupted: %s", step, root, corruption)


def remove_mark(folder: Path) -> None:
    """Remove the corruption mark from a step's folder, durably, if there is one."""
    mark = folder / CORRUPTION_MARK
    if mark.exists():
        mark.unlink()
        sync_folder(folder)
