"""Records: small JSON files that hold a dataclass of plain values.

Each carries its format and a digest of itself. A text without the right digest is torn or altered;
one with it and of another format is what another release has written (`FormatError`). These two
fields are the same in all formats, as is the meaning of ``run`` and ``step`` where a record has
them. Whoever reads a record is given one of the right types or an error of its own: a digest says
nothing of who wrote it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from trinity_sync.errors import FormatError
from trinity_sync.layout import SPOOL_FORMAT

T = TypeVar("T")

TRAINER = "the trainer's environment"
STACK = "the stack's environment"

_INTS_END = 2**63
"""What no file system, database or C library has as a size or number."""
_TIMES_END = 253e9
"""Seconds since the epoch, in the year 9987: ``datetime`` can still tell them."""


def write_note(path: Path, note: Any) -> None:
    """Leave a note, a dataclass of plain values, in place of the one that is there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_text(asdict(note), SPOOL_FORMAT))
    temporary.replace(path)


def read_note(path: Path, kind: type[T], *, writer: str) -> T | None:
    """The note; None without one, and with one that is torn or altered.

    Raises:
        FormatError: another release has written it.
    """
    try:
        return make_record(kind, from_text(path.read_bytes(), path, SPOOL_FORMAT, writer=writer))
    except (FileNotFoundError, ValueError):
        return None


def to_text(body: dict[str, Any], form: int, *, indent: int | None = None) -> str:
    """A record's values as text, with its format and its digest.

    Args:
        body: the values; none is named ``format`` or ``digest``.
        form: `SPOOL_FORMAT` or `ROOT_FORMAT`.
        indent: as of ``json.dumps``.
    """
    whole = {"format": form, **body}
    return json.dumps({**whole, "digest": digest_of_body(whole)}, indent=indent)


def from_text(
    text: str | bytes,
    path: Path | str,
    form: int,
    *,
    writer: str = "the environment that wrote it",
) -> dict[str, Any]:
    """The values in a text of `to_text`.

    Args:
        text: of the file.
        path: of the file, for messages.
        form: the one format that is read.
        writer: the environment that writes such records, in words.

    Raises:
        ValueError: it is torn, was altered, or has no digest or format.
        FormatError: it is whole, and of another format.
    """
    body = load_object(text)
    if body.pop("digest", None) != digest_of_body(body):
        raise ValueError("it was altered")
    found = body.pop("format", None)
    if type(found) is not int:
        raise ValueError("it has no format")
    if found != form:
        run, step = (
            value if type(value) is int and 0 <= value < _INTS_END else None
            for value in map(body.get, ("run", "step"))
        )
        raise FormatError.between(path, found, form, writer=writer, run=run, step=step)
    return body


def load_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: it is torn, nested too deeply, no text, or no object.
    """
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError("it is no JSON object")
    return body


def digest_of_body(body: dict[str, Any]) -> str:
    """Digest of a record's values, whatever their order and spacing in its file.

    Raises:
        ValueError: they are nested too deeply.
    """
    try:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def make_record(kind: type[T], body: Any, **given: Any) -> T:
    """Make a dataclass of what JSON gave, where each value has the type of its field.

    Values that are no fields of it are passed over: a later release may add some that another one
    can do without. An int is a size or a number, from 0 to what 63 bits hold, and a float is a time
    or duration in seconds, from 0 to the year 9987.

    Args:
        kind: the dataclass.
        body: its fields by name; those that have a default may be missing.
        given: fields that are not taken from ``body``, but as they are.

    Raises:
        ValueError: a field is missing, or of another type.
    """
    if not isinstance(body, dict):
        raise ValueError(f"it is no {kind.__name__}")
    makers = _makers(kind)  # type: ignore[arg-type]  # a class is hashable
    known = makers.keys() - given.keys()
    try:
        return kind(**{name: makers[name](body[name]) for name in known & body.keys()}, **given)
    except TypeError as error:
        raise ValueError(f"it lacks a field of a {kind.__name__}") from error


@cache
def _makers(kind: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _maker(hint) for name, hint in get_type_hints(kind).items()}


def _maker(hint: Any) -> Callable[[Any], Any]:
    """A function that returns a value of JSON as a field has it, or raises ValueError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return partial(_one_of, arguments)
    if origin is tuple:
        return partial(_tuple, _maker(arguments[0]))
    if origin is dict:
        return partial(_dict, _maker(arguments[1]))
    if is_dataclass(hint) and isinstance(hint, type):
        return partial(make_record, hint)
    return _PLAIN.get(hint, _refuse)


def _one_of(values: tuple[str, ...], value: Any) -> str:
    return value if isinstance(value, str) and value in values else _refuse(value)


def _tuple(make: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return tuple(map(make, value)) if isinstance(value, list) else _refuse(value)


def _dict(make: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(value)
    return {name: make(each) for name, each in value.items()}


def _int(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _INTS_END else _refuse(value)


def is_seconds(value: Any) -> bool:
    """Whether a record can have a value as a time or duration."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < _TIMES_END


def _seconds(value: Any) -> float:
    return float(value) if is_seconds(value) else _refuse(value)


def _exactly(kind: type, value: Any) -> Any:
    return value if type(value) is kind else _refuse(value)


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f"it has a field of another type or range, {type(value).__name__}")


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    int: _int,
    float: _seconds,
    str: partial(_exactly, str),
    bool: partial(_exactly, bool),
}
