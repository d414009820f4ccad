"""Versions of weights in an object store, for hosts that share no file system.

Layout and files are those of a folder (`published`). Each process works on a local folder, the
cache: a publisher writes a version there before it sends it, and a reader fetches into it what it
reads. A store has neither renames nor locks. So a publisher creates the ``version.json`` of its
number first, which one process can, and replaces the marker last, if it still is what the publisher
has read. Numbers of versions that a crash has left are not used again.
"""

import math
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.remote.remote_root import CHUNK, Remote
from trinity_sync.weights.folder.published import (
    FOLDER,
    MARKER,
    VERSION_FILE,
    PublishedVersion,
    decode_version,
    explain_missing,
    iter_version_folders,
    read_version,
    version_folder,
)

_PARALLEL = 8
"""Requests of a download in flight at a time; each holds a chunk in memory."""
_LOCK_S = 3600.0
"""Seconds to wait for another reader that fetches into the same cache."""


def open_bucket(out: str | Path, cache: str | Path | None) -> "tuple[Bucket | None, Path]":
    """Return the bucket of a URL, or None for a folder; and the local folder of the versions."""
    is_url = "://" in str(out)
    if is_url != (cache is not None):
        raise ConfigError(
            f"{out}: with the URL of an object store, pass cache=FOLDER for local copies of its "
            "versions; with a folder, pass none"
        )
    folder = Path(cache or out).absolute()
    return (Bucket(str(out), folder) if is_url else None), folder


class Bucket(Remote):
    """The versions at ``url``, and those of them in the folder ``cache``."""

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(url)
        self._cache = cache
        self._marker: bytes | None = None
        """Content of the marker as it was read last."""
        self._same: dict[str, str] = {}
        """Condition by which the store replaces that marker and no other, if it has conditions."""

    def read_latest(self) -> PublishedVersion | None:
        """Return the version that the marker names, in the cache; None if nothing was published."""
        if "s3" in self._fs.protocol:
            with self._translate_errors(f"read {MARKER} in"), suppress(FileNotFoundError):
                self._same = {"IfMatch": self._fs.info(f"{self._base}/{MARKER}")["ETag"]}
        self._marker = self._read(MARKER)
        where = f"{self.url}/{MARKER}"
        return decode_version(self._marker, where, self._cache) if self._marker else None

    def list_numbers(self) -> list[int]:
        """Return the numbers that are in use, also by versions that are not complete."""
        names = self._list_names("", "list the versions in")
        return sorted(int(match[1]) for name in names if (match := FOLDER.fullmatch(name)))

    def read_version(self, number: int) -> PublishedVersion:
        """Return a version by its number, as `published.read_version`."""
        name = version_folder(self._cache, number).name
        content = self._read(f"{name}/{VERSION_FILE}")
        if content is None:
            raise explain_missing(number, self.url)
        return decode_version(content, f"{self.url}/{name}/{VERSION_FILE}", self._cache)

    def push(self, version: PublishedVersion, record: bytes) -> None:
        """Send a version, and make it the newest one; ``record`` is the content of its file.

        Raises:
            WeightSyncError: another process publishes there.
            RemoteError: the store cannot be written.
        """
        name, before = version.folder.name, self._marker
        with self._translate_errors(f"write {name} to"):
            is_first = self._create(f"{name}/{VERSION_FILE}", record)
            if not is_first:  # also a request that was repeated because its answer was lost
                is_first = self._read(f"{name}/{VERSION_FILE}") == record
            if is_first:
                for path in version.folder.iterdir():
                    if path.name != VERSION_FILE:
                        self._fs.put_file(str(path), f"{self._base}/{name}/{path.name}")
            if is_first and before is None:
                self._create(MARKER, record)
            elif is_first and self._read(MARKER) == before:
                try:
                    self._fs.pipe_file(f"{self._base}/{MARKER}", record, **self._same)
                except Exception:  # stores differ in how they refuse
                    if self._read(MARKER) == before:
                        raise
            if self._read(MARKER) != record:
                raise WeightSyncError(
                    f"another process publishes into {self.url}, so version {version.version} is "
                    "not the newest; give each process its own URL, or publish again"
                )

    def remove_old(self, newest: int, kept: Collection[int]) -> None:
        """Remove versions before the newest that are not kept."""
        for number in reversed(self.list_numbers()):  # so a delta is removed before its base
            if number < newest and number not in kept:
                with self._translate_errors(f"remove version {number} from"):
                    self._remove_folder(f"{self._base}/{version_folder(Path(), number)}")

    def fetch(self, latest: PublishedVersion) -> None:
        """Fetch a version and those that it builds on, and remove older ones from the cache.

        Raises:
            DeltaError: a version is missing.
            RemoteError: the store cannot be read.
        """
        with acquire_file_lock(self._cache / ".reader.lock", limit_s=_LOCK_S):
            number: int | None = latest.version
            oldest = latest.version + 1
            while number is not None and number < oldest:
                oldest = number
                if not version_folder(self._cache, oldest).exists():
                    self._fetch_folder(version_folder(self._cache, oldest))
                number = read_version(self._cache, oldest).base
            self.clear_cache(before=oldest)

    def clear_cache(self, before: float = math.inf) -> None:
        """Remove the versions before a number from the cache."""
        for number, folder in iter_version_folders(self._cache):
            if number < before:
                shutil.rmtree(folder, ignore_errors=True)

    def _fetch_folder(self, folder: Path) -> None:
        """Fetch a version, which has its name once all is there; none if the store has none."""
        scratch = self._cache / ".fetching"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with self._translate_errors(f"read {folder.name} in"):
            found = self._fs.find(f"{self._base}/{folder.name}", detail=True)
            for path, info in found.items():
                self._fetch_file(path, info["size"], scratch / path.rpartition("/")[2])
        if found:
            scratch.rename(folder)

    def _fetch_file(self, path: str, nbytes: int, to: Path) -> None:
        with to.open("wb") as file, ThreadPoolExecutor(_PARALLEL) as pool:

            def fetch(start: int) -> None:
                end = min(start + CHUNK, nbytes)
                content = memoryview(self._fs.cat_file(path, start=start, end=end))
                while content:  # a disk that is nearly full takes a part, and then says why
                    content = content[os.pwrite(file.fileno(), content, end - len(content)) :]

            list(pool.map(fetch, range(0, nbytes, CHUNK)))
