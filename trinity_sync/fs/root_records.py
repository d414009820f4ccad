"""Records in a job's root: JSON with a digest of itself and the format of the root."""

from functools import partial
from pathlib import Path

from trinity_sync.errors import FormatError
from trinity_sync.fs import records
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT

to_text = partial(records.to_text, form=ROOT_FORMAT)
from_text = partial(records.from_text, form=ROOT_FORMAT)


def of_other_releases(root: str | Path) -> list[FormatError]:
    """Why records below ``root/.trinity_sync`` cannot be read that other releases have written."""
    private, found = Path(root) / PRIVATE_FOLDER, []
    for pattern in ("*.json", "*/*.json", "*/*.wish"):
        for path in sorted(private.glob(pattern)):
            try:
                from_text(path.read_bytes(), path)
            except FormatError as error:
                found.append(error)
            except (OSError, ValueError):
                continue  # said by whoever reads it
    return found
