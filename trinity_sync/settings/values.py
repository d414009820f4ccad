"""Values of settings: their forms as text and as objects, and sentences about wrong ones."""

import difflib
import json
import os
import re
import zoneinfo
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo

from trinity_sync.retention.policies import format_duration, parse_duration

_TIME_LIMIT = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<hours>\d\d):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)"
)
"""A time limit as in Slurm's ``--time``."""


def _to_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    text = value if isinstance(value, str) else ""
    if limit := _TIME_LIMIT.fullmatch(text):
        return timedelta(**{unit: int(number or 0) for unit, number in limit.groupdict().items()})
    if (seconds := parse_duration(text)) is None:
        raise ValueError("must be a number with a unit (s, m, h or d), or as 03:55:00")
    return timedelta(seconds=seconds)


def to_share(value: Any) -> float:
    """Return the share of 1 that a percentage is; raise ValueError for another value."""
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


def make_absolute(path: str | Path) -> Path:
    """Return the absolute form of a path, in which ``~`` is the home folder."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111, it never fails


def require_time_zone(name: str) -> str:
    """Return the name of a time zone; raise ValueError for another text that is not empty."""
    try:
        if name:
            zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError("must be the name of a time zone") from None
    return name


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
"""A duration, as text in files and variables: ``90s``, ``2m``, ``6h``, ``30d``, ``03:55:00``."""
Share = Annotated[
    float,
    BeforeValidator(to_share),
    PlainSerializer(lambda value: f"{100 * value:g}%" if value else "off", str, "json"),
]
"""A share of 1, as text in files and variables: ``2%``; ``off`` for 0."""
FullPath = Annotated[Path, AfterValidator(make_absolute)]
"""A path, which may be relative to the working folder or to the home folder."""
Paths = Annotated[
    tuple[FullPath, ...],
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
    return re.sub(r"(//[^/@:]*):.*@", r"\1:***@", to_text(value))


Name = tuple[str, ...]
"""Name of a setting: its field, or section and key."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest known name, or all known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def explain_unknown_variables(prefix: str, known: Iterable[str]) -> str:
    """Return a sentence for each variable with our prefix that is unknown; empty without one.

    Such a variable would be ignored in silence.
    """
    names = {*known}
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(prefix) and name not in names and not _is_of_kubernetes(name)
    )
    return "\n".join(f"the variable {name} is unknown; {suggest(name, names)}" for name in unknown)


def _is_of_kubernetes(name: str) -> bool:
    """Return whether Kubernetes sets a variable in all pods, for a service ``trinity-sync...``."""
    if re.fullmatch(r".*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)", name):
        return True
    return name.endswith("_PORT") and bool(re.match("(tcp|udp|sctp)://", os.environ[name]))


def explain(
    error: ValidationError,
    prefix: str,
    known: Mapping[Name, FieldInfo],
    in_file: Mapping[str, Any] | None = None,
    file: Path | None = None,
) -> str:
    """Return a sentence for each wrong value.

    ``known`` has all settings; their names have as many parts each. ``in_file`` is the content of
    ``file``.
    """
    parts = len(next(iter(known)))
    whys: dict[Name, list[str]] = {}
    values: dict[Name, Any] = {}
    for each in error.errors():
        name = tuple(map(str, each["loc"][:parts]))
        why = each["msg"].removeprefix("Value error, ")
        whys.setdefault(name, []).append(why[:1].lower() + why[1:])
        values[name] = each["input"]
    return "\n".join(
        _explain_value(
            name,
            values[name],
            " or ".join(whys[name]),
            prefix,
            known,
            f"{file}: " if name[0] in (in_file or {}) else "",
        )
        for name in whys
    )


def _explain_value(
    name: Name, value: Any, why: str, prefix: str, known: Mapping[Name, FieldInfo], file: str
) -> str:
    siblings = [each[-1] for each in known if each[:-1] == name[:-1]]
    if name in known:
        variable = (prefix + "__".join(name)).upper()
        if os.environ.get(variable):
            return f"{variable}={value}: {why}{_example(variable, known[name])}"
        where = f" in [{name[0]}]" if len(name) > 1 else ""
        example = _example(name[-1], known[name], toml=True)
        return f"{file}{name[-1]} = {value!r}{where}: {why}{example}"
    if siblings and len(name) > 1:
        return f"{file}unknown key {name[1]} in [{name[0]}]; {suggest(name[1], siblings)}"
    if siblings:
        return f"{name[0]} is no setting; {suggest(name[0], siblings)}"
    sections = {each[0] for each in known}
    if name[0] in sections:
        return f"{file}[{name[0]}]: {why}"
    return f"{file}unknown section [{name[0]}]; {suggest(name[0], sections)}"


def _example(name: str, field: FieldInfo, *, toml: bool = False) -> str:
    """Return the end of a sentence with a valid value; empty if none can be shown."""
    if field.default_factory is not None:
        return ""
    value = (field.examples or [field.default])[0]
    if isinstance(value, timedelta):
        value = format_duration(value.total_seconds())
    return f"; e.g. {name} = {json.dumps(value)}" if toml else f"; e.g. {name}={to_text(value)}"
