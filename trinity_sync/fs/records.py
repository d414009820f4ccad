"""Records: small JSON files with a type, a format number and a digest.

A record type is a frozen dataclass below `Record`, of which msgspec checks every value when a
record is read. The digest covers the values and the format. Without the right digest, a record is
torn or was altered (ValueError). With it and another format, it was written by another release
(`FormatError`). In all formats, ``format`` and ``digest`` are there, and ``run`` and ``step`` mean
the same in records that have them.

A digest does not say who wrote a record: values of another type or range are refused as well.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from trinity_sync.errors import FormatError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number or a size, which file systems, databases and C libraries can hold."""
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=253e9)]
"""A duration, or a time since the epoch up to the year 9987, which ``datetime`` can represent."""

TRAINER = "the trainer's environment"
STACK = "the stack's environment"
_EITHER = "the environment that wrote it"

R = TypeVar("R", bound="Record")


class Record:
    """Base of record types, which are frozen dataclasses::

        @dataclass(frozen=True)
        class Pin(Record, format=1, writer=STACK):
            step: Count
            reason: str = ""

    ``format`` is the one format that is read and written, ``writer`` the environment that writes
    such records, in words. Subclasses inherit both. No field is named ``format`` or ``digest``.
    """

    FORMAT: ClassVar[int]
    WRITER: ClassVar[str] = _EITHER

    def __init_subclass__(cls, *, format: int | None = None, writer: str = "") -> None:
        if format is not None:
            cls.FORMAT = format
        if writer:
            cls.WRITER = writer


def encode_record(record: Record, *, indent: int | None = None) -> str:
    """Return the text of a record.

    Args:
        record: its values are plain ones, records and containers of both.
        indent: as of ``json.dumps``.
    """
    return encode_body(msgspec.to_builtins(record), record.FORMAT, indent=indent)


def decode_record(kind: type[R], content: bytes, path: Path | str) -> R:
    """Return the record in the bytes of a file.

    Unknown values are ignored: a later release may add some that this one can do without.

    Args:
        kind: the type of the record.
        content: the whole file.
        path: of the file, for messages.

    Raises:
        ValueError: it is torn, was altered, or a value is missing or of another type or range.
        FormatError: another release has written it.
    """
    return msgspec.convert(decode_body(content, path, kind.FORMAT, kind.WRITER), kind)


def read_spool_record(kind: type[R], path: Path) -> R | None:
    """Return the record in a file; None if the file is missing, torn or altered.

    Raises:
        FormatError: another release has written it.
    """
    try:
        return decode_record(kind, path.read_bytes(), path)
    except (FileNotFoundError, ValueError):
        return None


def encode_body(body: dict[str, Any], format: int, *, indent: int | None = None) -> str:
    """Return the text of a record.

    Args:
        body: the values by name; no name is ``format`` or ``digest``.
        format: the format number.
        indent: as of ``json.dumps``.
    """
    whole = {"format": format, **body}
    return json.dumps({**whole, "digest": digest_body(whole)}, indent=indent)


def decode_body(
    content: bytes, path: Path | str, format: int, writer: str = _EITHER
) -> dict[str, Any]:
    """Return the values in a record, whose types are not checked.

    Args:
        content: the whole file.
        path: of the file, for messages.
        format: the one format that is read.
        writer: the environment that writes such records, in words.

    Raises:
        ValueError: it is torn, was altered, or has no digest or format.
        FormatError: it is intact, and of another format.
    """
    body = _load_object(content)
    if body.pop("digest", None) != digest_body(body):
        raise ValueError("it was altered")
    found = body.pop("format", None)
    if type(found) is not int:
        raise ValueError("it has no format")
    if found != format:
        run, step = _run_and_step(body)
        raise FormatError.between(path, found, format, writer=writer, run=run, step=step)
    return body


def run_and_step(content: bytes) -> tuple[int | None, int | None]:
    """Return the run and the step that a record is about, whatever its digest and format.

    Each is None where the record cannot be read or does not say it.
    """
    try:
        return _run_and_step(_load_object(content))
    except ValueError:
        return None, None


def digest_body(body: dict[str, Any]) -> str:
    """Return the digest of a record's values, whatever their order and spacing in the file.

    Raises:
        ValueError: they are nested too deeply.
    """
    try:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _load_object(content: bytes) -> dict[str, Any]:
    # not by msgspec, which knows no NaN: a metric may be one
    try:
        body = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    return body


def _run_and_step(body: dict[str, Any]) -> tuple[int | None, int | None]:
    return _count_or_none(body.get("run")), _count_or_none(body.get("step"))


def _count_or_none(value: Any) -> int | None:
    try:
        return msgspec.convert(value, Count)
    except msgspec.ValidationError:
        return None
