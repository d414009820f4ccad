"""A store of copies behind an fsspec URL: ``s3://bucket/job``, ``file:///backup/job``, and others.

::

    url/global_step_40/manifest.json        its appearance commits the copy
    url/global_step_40/actor/...            the files that it names
    url/global_step_40/.uploaded/...        while it is uploaded: what each whole file holds
    url/.trinity_sync/runs/3.json           where steps count in the store: see ``primary``

Bytes are streamed in chunks, whatever the size of a file. Credentials and the store's address come
from the environment only (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` and so on for S3), so that no
parameter, log or message can hold them.
"""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from trinity_sync.errors import (
    ConfigError,
    FormatError,
    ManifestError,
    RemoteError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import make_folder
from trinity_sync.fs.create import create_file
from trinity_sync.fs.direct_io import DIGEST
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, ROOT_FORMAT, parse_number, step_of_folder
from trinity_sync.storage.discovery import State
from trinity_sync.storage.manifest import FileRecord, Manifest, parse_manifest
from trinity_sync.storage.runs import Run

LOCAL = ("file", "local")
"""Protocols of folders of this node."""
ELSEWHERE = {"abfs", "abfss", "adl", "az", "box", "cos", "dbfs", "dropbox", "gcs", "gdrive", "gs"}
ELSEWHERE |= {"hf", "lakefs", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs"}
"""Protocols of stores that are on no node. The host of ``sftp``, ``smb`` or ``webhdfs`` may be this
one, and ``hdfs`` is, where nobody has told Hadoop otherwise."""
CHUNK = 16 << 20
"""Bytes of a part; a file in flight takes about three of them in memory."""
UPLOADED = ".uploaded"
_MOST_PARTS = 9_000  # S3 takes 10,000
_LOOKS = 8
"""Steps that are looked at at a time."""


@dataclass(frozen=True)
class RemoteStep:
    """A step as it lies in the store."""

    step: int
    manifest: Manifest | None
    state: State
    """By names and sizes; no step in a store is ``superseded``."""
    unreadable: FormatError | None = None
    """Why this release cannot read it, if another one has sent it."""


@dataclass(frozen=True)
class _Uploaded(Record, format=ROOT_FORMAT):
    """What a file holds that was uploaded, while its step is not committed there."""

    nbytes: Count
    file_digest: str
    """As in the step's manifest."""
    state: str
    """What the store says of the file; another one once it is written again."""


def refuse_credentials(url: str) -> None:
    """See that a store's URL may be shown to anybody.

    Raises:
        ConfigError: it holds a user, a password or a query, or chains URLs that might.
    """
    if "::" in url:  # fsspec's way to say that one of its file systems is behind another
        raise ConfigError(
            "a URL with :: chains file systems, and steps are kept in one; pass the URL of the "
            "store alone, like s3://bucket/job or file:///copies"
        )
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"the URL of {parts.scheme}://.../{parts.path.strip('/')} holds a user, a password "
            "or a query; put credentials into the environment, where logs do not see them"
        )


def protocol_of(url: str) -> str:
    """The protocol by which a store's URL is reached, as it is spelled there.

    Raises:
        ConfigError: it is no URL of a folder, or may not be shown to anybody.
    """
    refuse_credentials(url)
    protocol, separator, where = url.partition("://")
    if not separator or not where.strip("/"):
        raise ConfigError(
            f"{url!r} is no URL of a folder; pass one like s3://bucket/job or file:///copies"
        )
    return protocol


class Remote:
    """The steps of one job in a store.

    Raises:
        ConfigError: the URL cannot be used, or a package is needed for it.
    """

    def __init__(self, url: str) -> None:
        protocol = protocol_of(url)
        self.url = url.rstrip("/")
        local = {"auto_mkdir": True} if protocol in LOCAL else {}
        options = {"use_listings_cache": False, **local}
        try:
            self._fs: fsspec.AbstractFileSystem
            self._fs, self._base = url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"{protocol}:// needs a package that is not installed ({error}); for S3: "
                "pip install 'trinity-sync[s3]'"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{url!r} cannot be used: {error}") from error

    @property
    def folder(self) -> Path | None:
        """The folder on this node that it is, whatever the form of its URL; None if it is none."""
        return Path(self._base) if isinstance(self._fs, LocalFileSystem) else None

    # ---------------------------------------------------------------- steps

    def steps(self) -> list[RemoteStep]:
        """All steps in the store, committed or not, by number."""
        found = (step_of_folder(name) for name in self._names("", "list the steps of"))
        numbers = sorted(number for number in found if number is not None)
        with ThreadPoolExecutor(_LOOKS, "steps") as pool:
            return list(pool.map(self.step, numbers))

    def step(self, step: int) -> RemoteStep:
        """One step, which need not be there."""
        try:
            manifest = self.manifest(step)
        except ManifestError:
            return RemoteStep(step, None, "corrupted")
        except FormatError as error:
            return RemoteStep(step, None, "another format", error)
        if manifest is None:
            return RemoteStep(step, None, "not committed")
        sizes = self.sizes(step)
        valid = all(sizes.get(record.path) == record.nbytes for record in manifest.files)
        return RemoteStep(step, manifest, "valid" if valid else "corrupted")

    def committed(self) -> list[Manifest]:
        """Return the valid steps, oldest first: by run, then by number."""
        found = [step.manifest for step in self.steps() if step.state == "valid"]
        return sorted((m for m in found if m), key=lambda manifest: (manifest.run, manifest.step))

    def newest_first(self) -> Iterator[Manifest]:
        """As `committed`, the newest first.

        Raises:
            FormatError: it is the turn of a step that another release has sent.
        """
        found: dict[tuple[int, int], Manifest | FormatError] = {}
        for step in self.steps():
            if step.unreadable:
                found[step.unreadable.run or 0, step.step] = step.unreadable
            elif step.manifest and step.state == "valid":
                found[step.manifest.run, step.step] = step.manifest
        for _, each in sorted(found.items(), reverse=True):
            if isinstance(each, FormatError):
                raise each
            yield each

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of a step; None if it is not committed.

        Raises:
            ManifestError: it is torn or altered.
            FormatError: another release has sent it.
        """
        content = self.read(step, MANIFEST)
        where = f"{self.url}/global_step_{step}/{MANIFEST}"
        return None if content is None else parse_manifest(content, where, step)

    def sizes(self, step: int) -> dict[str, int]:
        """Bytes of every file of a step, by its path below the step's folder."""
        folder = self._path(step, "")
        with self._reaching(f"list step {step} in"):
            found: dict[str, Any] = self._fs.find(folder, detail=True)
        return {path.removeprefix(folder): info["size"] for path, info in found.items()}

    def remove(self, step: int) -> None:
        """Remove a step, its manifest first: what is left of it is never taken for a step."""
        self.uncommit(step)
        with self._reaching(f"remove step {step} from"):
            self._fs.rm(self._path(step, ""), recursive=True)

    def uncommit(self, step: int) -> None:
        """Remove the manifest of a step."""
        with self._reaching(f"remove the manifest of step {step} from"):
            self._fs.rm_file(self._path(step, MANIFEST))

    # ---------------------------------------------------------------- runs

    def runs(self) -> list[Run]:
        """The runs that have sent steps here, the first one first; a torn one is passed over.

        Raises:
            FormatError: one of them is of another release.
        """
        names = self._names(f"/{PRIVATE_FOLDER}/runs", "list the runs of")
        found = (parse_number(name.removesuffix(".json")) for name in names)
        numbers = sorted(number for number in found if number is not None)
        return [run for number in numbers if (run := self._run(number))]

    def claim_run(self, run: Run) -> Run | None:
        """Let no other run have this number; returns the run that has it, None if that is torn."""
        content = encode_record(run).encode()
        if self._create(f"{PRIVATE_FOLDER}/runs/{run.number}.json", content):
            return run
        return self._run(run.number)

    def writes_once(self) -> bool:
        """Whether the store refuses a second write of a name that is to be written once.

        Raises:
            RemoteError: it cannot be written at all.
        """
        name = f"{PRIVATE_FOLDER}/probes/{uuid.uuid4().hex}"
        self._create(name, b"probe")
        once = not self._create(name, b"again")
        with self._reaching("clean up in"):
            self._fs.rm_file(f"{self._base}/{name}")
        return once

    def _run(self, number: int) -> Run | None:
        name = f"{PRIVATE_FOLDER}/runs/{number}.json"
        with self._reaching(f"read run {number} in"):
            content = self._fs.cat_file(f"{self._base}/{name}")
        try:
            run = decode_record(Run, content, f"{self.url}/{name}")
        except ValueError:
            return None
        return run if run.number == number else None

    # ---------------------------------------------------------------- bytes

    def read(self, step: int, name: str) -> bytes | None:
        """All bytes of a small file; None if there is none."""
        with self._reaching(f"read {name} of step {step} in"):
            try:
                content: bytes = self._fs.cat_file(self._path(step, name))
            except FileNotFoundError:
                return None
        return content

    def write(self, step: int, name: str, content: bytes) -> None:
        """Write a small file in one request."""
        with self._reaching(f"write {name} of step {step} to"):
            self._fs.pipe_file(self._path(step, name), content)

    def create(self, step: int, name: str, content: bytes) -> bool:
        """Write a small file that is not there yet, in one request; False if there is one."""
        return self._create(f"global_step_{step}/{name}", content)

    def chunks(self, step: int, name: str) -> Iterator[bytes]:
        """The bytes of a file, in order, each chunk as it arrives."""
        with (
            self._reaching(f"read {name} of step {step} in"),
            self._fs.open(
                self._path(step, name), "rb", block_size=CHUNK, cache_type="readahead"
            ) as file,
        ):
            while chunk := file.read(CHUNK):
                yield chunk

    def wrong_with(self, step: int, record: FileRecord, took: Callable[[int], object]) -> str:
        """Read a file again: why it is not what its record says; empty if it is."""
        digest = xxhash.xxh3_128()
        try:
            for chunk in self.chunks(step, record.path):
                digest.update(chunk)
                took(len(chunk))
        except RemoteError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return "is missing"
            raise
        return "" if f"{DIGEST}:{digest.hexdigest()}" == record.digest else "has other bytes"

    def upload(self, step: int, name: str, chunks: Iterator[bytes], nbytes: int) -> None:
        """Write a file as its chunks come; one that fails is given up, not left as a part.

        Raises:
            RemoteError: it cannot be written, or has another size afterwards.
        """
        path = self._path(step, name)
        part = max(CHUNK, nbytes // _MOST_PARTS)
        with self._reaching(f"write {name} of step {step} to"):
            file = self._fs.open(path, "wb", block_size=part)
            try:
                for chunk in chunks:
                    file.write(chunk)
            except BaseException:
                if isinstance(file, AbstractBufferedFile):  # closing would complete a half file
                    file.closed = True
                    file.discard()
                raise
            file.close()
            found = self._fs.info(path)["size"]
        if found != nbytes:
            raise RemoteError(
                f"{self.url}/global_step_{step}/{name} has {found:,} bytes after its upload and "
                f"should have {nbytes:,}; repeat the upload"
            )

    # ---------------------------------------------------------------- uploads that broke off

    def note_upload(self, step: int, record: FileRecord) -> None:
        """Write down what a whole file holds, so that an upload that breaks off goes on there."""
        with self._reaching(f"look at {record.path} of step {step} in"):
            state = str(self._fs.ukey(self._path(step, record.path)))
        uploaded = _Uploaded(record.nbytes, record.digest, state)
        self.write(step, f"{UPLOADED}/{record.path}", encode_record(uploaded).encode())

    def is_uploaded(self, step: int, record: FileRecord) -> bool:
        """Whether the file is there with these bytes and was not written since it was noted."""
        name = f"{UPLOADED}/{record.path}"
        try:
            found = decode_record(_Uploaded, self.read(step, name) or b"", f"{self.url}/{name}")
        except (ValueError, FormatError):
            return False
        with self._reaching(f"look at {record.path} of step {step} in"):
            try:
                state = str(self._fs.ukey(self._path(step, record.path)))
            except FileNotFoundError:
                return False
        return found == _Uploaded(record.nbytes, record.digest, state)

    def forget_uploads(self, step: int) -> None:
        """Remove the notes of a step whose manifest says it all."""
        with self._reaching(f"clean up step {step} in"):
            try:
                self._fs.rm(self._path(step, UPLOADED), recursive=True)
            except FileNotFoundError:
                return

    def _create(self, name: str, content: bytes) -> bool:
        """Write a file that is not there; a store without such a write is looked at first."""
        path = f"{self._base}/{name}"
        with self._reaching(f"write {name} to"):
            if isinstance(self._fs, LocalFileSystem):  # whole or absent, as in a store
                make_folder(Path(path).parent)
                return create_file(Path(path), content)
            try:
                with self._fs.open(path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            except (OSError, NotImplementedError, ValueError) as error:
                reason = repr(error.__cause__)
                if "PreconditionFailed" in reason:
                    return False
                if isinstance(error, OSError) and "NotImplemented" not in reason:
                    raise
                if self._fs.exists(path):
                    return False
                self._fs.pipe_file(path, content)
        return True

    def _names(self, folder: str, what: str) -> list[str]:
        """What lies in a folder; nothing if there is none."""
        with self._reaching(what):
            try:
                names = self._fs.ls(self._base + folder, detail=False)
            except FileNotFoundError:
                return []
        return [name.rstrip("/").rpartition("/")[2] for name in names]

    def _path(self, step: int, name: str) -> str:
        return f"{self._base}/global_step_{step}/{name}"

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """Every library's own errors, as a sentence; each store has others."""
        try:
            yield
        except TrinitySyncError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RemoteError(
                f"cannot {what} {self.url}: {reason}. Check the URL, and the store's address and "
                "credentials in the environment, then repeat; what is there is used again."
            ) from error
