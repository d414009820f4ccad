"""Sentences about wrong settings: where each is, what is wrong, and what would be right."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trinity_sync.configuration.values import to_text
from trinity_sync.retention.policies import format_duration

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
