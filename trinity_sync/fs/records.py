"""Records: small JSON files with a type and a digest.

A record type is a frozen dataclass below `Record`; msgspec checks every value when a record is
read. The digest is the last value of the object and covers all bytes before it. A record with a
wrong digest is torn or was altered (ValueError).

Few records have a format number: the identity of a root and the owner of a spool's folder, each for
everything that is there, and manifests and runs, which are read in other places as well. One with a
valid digest and another number was written by another release (`FormatError`). All formats have
``format`` and ``digest``, and ``run`` has the same meaning in all of them.

A digest does not authenticate the writer, so values of a wrong type or range are also refused.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import read_file

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number or a size that fits into a signed 64-bit integer."""
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=253e9)]
"""A duration, or a time since the epoch that ``datetime`` can represent (up to the year 9987)."""

R = TypeVar("R", bound="Record")
T = TypeVar("T")


class Record:
    """Base of record types, which are frozen dataclasses::

        @dataclass(frozen=True)
        class Run(Record, format=1):
            number: Count
            key: str = ""

    ``format`` is the supported format number, for records that have one. No field is named
    ``format`` or ``digest``.
    """

    FORMAT: ClassVar[int | None] = None

    def __init_subclass__(cls, *, format: int | None = None) -> None:
        if format is not None:
            cls.FORMAT = format


def encode_record(record: Record, *, indent: int | None = None) -> str:
    """Return the text of a record whose values are plain values, records and containers of them."""
    format = {} if record.FORMAT is None else {"format": record.FORMAT}
    body = {**format, **msgspec.to_builtins(record)}
    return add_digest(json.dumps(body, indent=indent))


def decode_record(kind: type[R], content: bytes, path: Path | str) -> R:
    """Return the record in the bytes of a file; ``path`` is for messages.

    Unknown values are ignored: a later release may add optional values.

    Raises:
        ValueError: it is torn or was altered, or a value is missing or of a wrong type or range.
        FormatError: it is intact, and of another format.
    """
    _require_digest(content)
    if kind.FORMAT is not None:
        head = _load(content, _Head)
        if type(head.format) is not int:
            raise ValueError("it has no format")
        if head.format != kind.FORMAT:
            raise FormatError.between(path, head.format, kind.FORMAT, run=_count_or_none(head.run))
    return _load(content, kind)


def read_record(kind: type[R], path: Path, read: Callable[[Path], bytes] = read_file) -> R | None:
    """Return the record in a file; None if the file is missing, torn or altered, or no file.

    ``read`` is `read_uncached` for a file that another node may have replaced.
    """
    try:
        return decode_record(kind, read(path), path)
    except (FileNotFoundError, ValueError):
        return None


def describe(kind: type[T]) -> type[T]:
    """Return a type that any number of threads may decode: msgspec knows what it consists of.

    msgspec 0.22 finds that out at the first use and keeps it with the type, and with each type that
    is part of it. A thread that meets what another one has not finished crashes the process.
    """
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind)
            _described.add(kind)
    return kind


def decode_lines(kind: type[T], content: bytes) -> Iterator[T]:
    """Yield the values in lines of JSON, without those of another type, and truncated ones."""
    for line in content.splitlines():
        with suppress(ValueError):
            yield msgspec.json.decode(line, type=describe(kind))


_described: set[Any] = set()
_describing = threading.RLock()  # a finalizer may fork
os.register_at_fork(
    before=_describing.acquire,
    after_in_parent=_describing.release,
    after_in_child=_describing.release,
)


def encode_body(body: dict[str, Any], *, indent: int | None = None) -> str:
    """Return the text of a record of one or more values by name; no name is ``digest``."""
    return add_digest(json.dumps(body, indent=indent))


def add_digest(text: str) -> str:
    """Return the text of a record, given that of an object with its values."""
    covered = text.removesuffix("}").rstrip()
    return covered + _make_end(covered.encode()).decode()


def decode_body(content: bytes) -> dict[str, Any]:
    """Return the values in a record, without a check of their types.

    Raises:
        ValueError: it is torn or was altered, or has no digest.
    """
    _require_digest(content)
    body = _load(content, dict[str, Any])
    return {name: value for name, value in body.items() if name != "digest"}


def parse_run_and_step(content: bytes) -> tuple[int | None, int | None]:
    """Return the run and the step in a record, whatever its digest.

    Each is None if the record cannot be read or does not contain it.
    """
    try:
        head = _load(content, _Head)
    except ValueError:
        return None, None
    return _count_or_none(head.run), _count_or_none(head.step)


class _Head(msgspec.Struct):
    """What is read in any record; each value may be missing or of any type."""

    format: Any = None
    run: Any = None
    step: Any = None


def _require_digest(content: bytes) -> None:
    covered, end = content[:-_END_NBYTES], content[-_END_NBYTES:]
    if end != _make_end(covered):
        raise ValueError("its digest differs")


def _make_end(covered: bytes) -> bytes:
    """Return what follows the bytes that the digest covers, to the end of the file."""
    return b',\n "digest": "sha256:%s"\n}' % hashlib.sha256(covered).hexdigest().encode()


_END_NBYTES = len(_make_end(b""))


def _load(content: bytes, kind: type[T]) -> T:
    try:
        try:
            return msgspec.json.decode(content, type=describe(kind))
        except msgspec.DecodeError:  # also of NaN, as in metrics, and of lone surrogates
            return msgspec.convert(json.loads(content), kind, str_keys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _count_or_none(value: Any) -> int | None:
    try:
        return msgspec.convert(value, Count)
    except msgspec.ValidationError:
        return None
