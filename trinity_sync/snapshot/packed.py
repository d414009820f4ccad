"""Files as one image: an index of them, then their contents.

Metadata and attachments are staged in this form. Contents of files on the disk are read when the
image is filled, into the slot; other files stay where they are and are only named.
"""

import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath

import msgspec

from trinity_sync.errors import ConfigError, ImageError
from trinity_sync.fs.atomic import open_fd
from trinity_sync.fs.direct_io import ALIGNMENT
from trinity_sync.fs.records import describe
from trinity_sync.layout import is_below

_HEAD = struct.Struct("<Q")
"""Length of the index in bytes."""
_AT_ONCE = 1 << 30
"""Bytes of one read; Linux reads at most 2 GiB."""
_LONGEST = 200
"""Bytes of a file's name: file systems allow 255, and its temporary name is longer."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    name: str
    offset: int
    """Of the content, from the end of the index rounded up to a page."""
    nbytes: int
    link: str = ""
    """Path of a file that stays on the disk."""


@dataclass(frozen=True)
class Packed:
    """An image of ``nbytes`` bytes: what is in memory, and the files to read into it."""

    nbytes: int
    extents: list[tuple[int, bytes]]
    """Index and contents, with their offsets."""
    files: tuple[tuple[int, int, Path], ...] = ()
    """Offset, number of bytes and path of each file to read."""

    def read_files(self, image: memoryview) -> None:
        """Read the files into the image.

        Raises:
            ImageError: a file cannot be read, or has another size than when it was packed.
        """
        for offset, nbytes, path in self.files:
            try:
                with open_fd(path) as fd:
                    done = 0
                    while left := image[offset + done : offset + min(nbytes, done + _AT_ONCE)]:
                        if not (read := os.preadv(fd, [left], done)):
                            break
                        done += read
                    # files of /proc have more than the 0 bytes that they are said to have
                    found = max(os.fstat(fd).st_size, done + len(os.pread(fd, 1, done)))
            except OSError as error:
                raise ImageError(f"{path} cannot be read: {error.strerror}") from error
            if not done == found == nbytes:
                raise ImageError(
                    f"{path} had {nbytes:,} bytes and has {found:,}: files of a folder must not "
                    "change until its save has returned"
                )


def list_files(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by path, in order; links are followed.

    Raises:
        ConfigError: a folder cannot be read, a link leads to a folder above it or nowhere, or
            something is neither a file nor a folder.
    """
    return {path.relative_to(folder).as_posix(): path for path in _walk(folder, frozenset())}


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Yield the files below a folder that is in the folders ``above``, whose paths are real."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be saved: {error.strerror}; pass a folder that can be read"
        ) from error
    above |= {folder.resolve()}
    for path in entries:
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in above:
            yield from _walk(path, above)
        else:
            what = "neither a file nor a folder, nor a link to one"
            what = "a link to a folder that it is in" if path.is_dir() else what
            raise ConfigError(
                f"{path} cannot be saved: it is {what}; remove it, or pass another folder"
            )


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files below a folder by path."""
    return {name: path.read_bytes() for name, path in list_files(folder).items()}


def require_names(paths: Collection[str]) -> None:
    """Require that the files of an image can be written by these paths, each to a file of its own.

    Raises:
        ConfigError: a path leads out of its folder, is not valid text or not as short as it can be,
            has a name that is too long, or is below another of the paths.
    """
    for path in paths:
        names = path.split("/")
        try:
            is_valid = all(len(name.encode()) <= _LONGEST for name in names) and is_below(path)
        except UnicodeEncodeError:
            is_valid = False
        if not is_valid or not {"", "."}.isdisjoint(names):
            raise ConfigError(
                f"{path!r} cannot be saved: pass a path below the folder, whose names are valid "
                f"UTF-8 of at most {_LONGEST} bytes, as in 'folder/file'"
            )
        for above in accumulate(names[:-1], "{}/{}".format):
            if above in paths:
                raise ConfigError(
                    f"{path!r} cannot be saved next to a file {above!r}; rename one of them"
                )


def pack(files: Mapping[str, bytes | Path], links: Mapping[str, Path] | None = None) -> Packed:
    """Return files, by path, as one image; a path is a file to read when the image is filled.

    ``links`` are files that stay on the disk, by their names in the step's folder.

    Raises:
        ConfigError: as `require_names`; a file is given neither as bytes nor as its path.
        OSError: a file cannot be looked at.
    """
    require_names(files)
    entries, contents, end = list[_Entry](), list[bytes | Path](), 0
    for name, content in files.items():
        if not isinstance(content, bytes | Path):
            raise ConfigError(
                f"{name!r} is given as a {type(content).__name__}; pass its content as bytes, or "
                "a pathlib.Path of the file"
            )
        nbytes = content.stat().st_size if isinstance(content, Path) else len(content)
        if isinstance(content, Path):  # large ones are written by direct I/O
            end = _round_up(end)
        entries.append(_Entry(name, end, nbytes))
        contents.append(content)
        end += nbytes
    index = [*entries, *(_Entry(name, 0, 0, str(path)) for name, path in (links or {}).items())]
    head = msgspec.msgpack.encode(index)
    begin = _round_up(_HEAD.size + len(head))
    placed = [(begin + entry.offset, c) for entry, c in zip(entries, contents, strict=True)]
    return Packed(
        begin + end,
        [(0, _HEAD.pack(len(head)) + head), *((at, c) for at, c in placed if isinstance(c, bytes))],
        tuple(
            (at, entry.nbytes, c)
            for entry, (at, c) in zip(entries, placed, strict=True)
            if isinstance(c, Path)
        ),
    )


def unpack(image: memoryview, what: str) -> Iterator[tuple[str, memoryview | Path]]:
    """Yield path and content of each file of an image, or the path of one that is on the disk.

    The contents are views of the image. ``what`` names it in messages.

    Raises:
        ImageError: it is no such image, or names a file outside of the folder.
    """
    entries, contents = _read_index(image, what)
    for entry in entries:
        name = PurePosixPath(entry.name)
        if not name.parts or name.is_absolute() or ".." in name.parts:
            raise ImageError(f"the image of {what} has {entry.name!r}, which no folder contains")
        begin = contents + entry.offset
        if entry.link:
            yield entry.name, Path(entry.link)
        elif entry.offset >= 0 and 0 <= entry.nbytes <= len(image) - begin:
            yield entry.name, image[begin : begin + entry.nbytes]
        else:
            raise ImageError(f"the image of {what} is too short for {entry.name!r}")


def _read_index(image: memoryview, what: str) -> tuple[list[_Entry], int]:
    """Return the index, and the offset at which the contents begin."""
    try:
        end = _HEAD.size + int(_HEAD.unpack_from(image)[0])
        kind = describe(list[_Entry])
        return msgspec.msgpack.decode(image[_HEAD.size : end], type=kind), _round_up(end)
    except (struct.error, msgspec.DecodeError) as error:
        raise ImageError(f"the image of {what} is no folder of files: {error}") from error


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
