"""Sizes, durations and artifact keys, worded the same in the Prefect UI and in the report."""

import re
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.layout import job_id_of

RETENTION = "retention"
VERIFIED = "verified"
"""Subjects of table artifacts, see `make_artifact_key`."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes such as ``5.0 GB``."""
    size = float(nbytes)
    for unit in _UNITS[:-1]:
        if size < 999.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {_UNITS[-1]}"


def format_duration(seconds: float) -> str:
    """Return a duration such as ``106 ms``, ``2.4 s``, ``14 min``, ``3.5 h`` or ``12 d``."""
    for limit, unit, name in ((0.9995, 1e-3, "ms"), (99.5, 1, "s"), (5370, 60, "min")):
        if seconds < limit:
            value = seconds / unit
            return f"{value:.{int(name == 's' and value < 9.95)}f} {name}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 47.95 else f"{hours / 24:.0f} d"


def format_rate(nbytes: float, seconds: float) -> str:
    """Return a throughput such as ``2.6 GB/s``; empty if nothing was written."""
    return f"{format_bytes(nbytes / seconds)}/s" if nbytes and seconds > 0 else ""


def parse_size(text: str) -> int:
    """Parse a number of bytes such as ``5GB``, ``500 MB``, ``2GiB`` or ``1000``.

    Raises:
        ConfigError: The text is not a size.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[f"{letter}b"] = units[letter] = 1000**power
        units[f"{letter}ib"] = 1024**power
    number = text.strip().lower().rstrip("bgikmt ")
    unit = text.strip().lower().removeprefix(number).strip()
    try:
        nbytes = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"{text!r} is not a size; write it like 500MB, 5GB or 2GiB")
    return nbytes


def make_artifact_key(what: str, root: str | Path) -> str:
    """Return the key of an artifact about a job: keys are global on a Prefect server.

    ``what`` has lower-case letters and dashes only. ``root`` is the real path, which is not looked
    up: its file system may hang.
    """
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', job_id_of(Path(root)).lower())}"
