"""Forms of the values of settings: durations, shares and paths, as text and as objects."""

import json
import os
import re
import zoneinfo
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from trinity_sync.retention.policies import format_duration, parse_duration


def _to_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        raise ValueError("must be a number with a unit: s, m, h or d")
    return timedelta(seconds=seconds)


def _to_share(value: Any) -> Any:
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", value) if isinstance(value, str) else None
    if value != "off" and (not found or not 0 < float(found[1]) <= 100):
        raise ValueError("must be a percentage above 0% and up to 100%, or off")
    return float(found[1]) / 100 if found else 0.0


def _to_names(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _to_paths(value: Any) -> Any:
    return [path for path in value.split(os.pathsep) if path] if isinstance(value, str) else value


def require_time_zone(name: str) -> str:
    """Return the name of a time zone; raise ValueError for another text that is not empty."""
    try:
        if name:
            zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError("must be the name of a time zone") from None
    return name


def require_cron(text: str) -> str:
    """Return a cron expression or ``off``; raise ValueError for another text."""
    if text != "off" and len(text.split()) != 5:
        raise ValueError("must be the five fields of a cron expression, or off")
    return text


def require_port(address: str) -> str:
    """Return ``host:port``; raise ValueError for another text that is not empty."""
    if address and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise ValueError("must be an address and a port")
    return address


Duration = Annotated[
    timedelta,
    BeforeValidator(_to_duration),
    PlainSerializer(lambda value: format_duration(value.total_seconds()), str, "json"),
]
"""A duration, as text in files and variables: ``90s``, ``2m``, ``6h``, ``30d``."""
Share = Annotated[
    float,
    BeforeValidator(_to_share),
    PlainSerializer(lambda value: f"{100 * value:g}%" if value else "off", str, "json"),
]
"""A share of 1, as text in files and variables: ``2%``; ``off`` for 0."""
Paths = Annotated[
    tuple[Path, ...],
    BeforeValidator(_to_paths),
    PlainSerializer(lambda value: os.pathsep.join(map(str, value)), str, "json"),
]
"""Folders: a list in files, separated by ``:`` in variables."""
Names = Annotated[
    tuple[str, ...], BeforeValidator(_to_names), PlainSerializer(",".join, str, "json")
]
"""Names, with commas between them in variables."""


def to_text(value: Any) -> str:
    """Return a value in the form of a variable."""
    if isinstance(value, tuple):
        return os.pathsep.join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def show_value(value: Any) -> str:
    """Return `to_text` of a value without the password of a URL."""
    return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", to_text(value))
