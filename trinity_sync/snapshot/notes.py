"""Small files beside a slot that say what its bytes are: whole or not there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def write_note(path: Path, note: Any) -> None:
    """Leave a note, a dataclass of plain values, in place of the one that is there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(asdict(note)))
    temporary.replace(path)


def read_note(path: Path, kind: type[T]) -> T | None:
    """The note; None without one, and with one that is not understood."""
    try:
        return kind(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
