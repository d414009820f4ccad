"""Steps of a job behind an fsspec URL: ``s3://bucket/job``, ``file:///backup/job``, and others.

::

    url/global_step_40/manifest.json        its appearance commits the copy
    url/global_step_40/actor/...            the files in the manifest
    url/global_step_40/.uploaded/...        during an upload: records of the complete files
    url/.trinity_sync/identity.json         whose steps these are: see ``upload``
    url/.trinity_sync/runs/3.json           the runs that have sent steps

Bytes are streamed in chunks, whatever the size of a file. Credentials and the address of the
service come from the environment only (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` and so on for
S3), so that no parameter, log or message contains them.

Whatever reads manifests, runs or the identity raises `FormatError` if another release has sent it.
"""

import errno
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from trinity_sync.errors import ConfigError, ManifestError, RemoteError, TrinitySyncError, warn_once
from trinity_sync.fs.atomic import link_or_copy, make_folder, replace_file, sync_file, sync_folder
from trinity_sync.fs.direct_io import DIGEST
from trinity_sync.fs.file_system import is_recent
from trinity_sync.fs.locks import create_file
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, parse_number, step_of_folder
from trinity_sync.snapshot.identity import IDENTITY_FILE, JobIdentity
from trinity_sync.storage.discovery import State
from trinity_sync.storage.manifest import FileRecord, Manifest, parse_manifest
from trinity_sync.storage.runs import Run, find_superseded_steps

LOCAL = ("file", "local")
"""Protocols of local folders."""
ELSEWHERE = {"abfs", "abfss", "adl", "az", "box", "cos", "dbfs", "dropbox", "gcs", "gdrive", "gs"}
ELSEWHERE |= {"hf", "lakefs", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs"}
"""Protocols of services that are not on this node. The host of ``sftp``, ``smb`` or ``webhdfs`` may
be this node, and ``hdfs`` is local unless Hadoop is configured otherwise."""
CHUNK = 16 << 20
"""Bytes of a chunk; a file in flight takes about three chunks of memory."""
UPLOADED = ".uploaded"
_MOST_PARTS = 9_000  # S3 takes 10,000
_PARALLEL_READS = 8
"""Number of steps whose state is read at a time."""
_PARALLEL_REMOVALS = 32
"""Number of files that are removed at a time where one request removes one file."""


@dataclass(frozen=True)
class RemoteStep:
    """A step in a remote."""

    step: int
    manifest: Manifest | None
    state: State
    """State by names and sizes; no step in a remote is ``superseded``."""


@dataclass(frozen=True)
class _Uploaded(Record):
    """Record of a complete file of a step that is not committed in the remote yet."""

    nbytes: Count
    file_digest: str
    """Digest as in the step's manifest."""
    state: str
    """Version of the file in the remote (``fsspec``'s ``ukey``); it changes with each write."""


def refuse_credentials(url: str) -> None:
    """Refuse a remote's URL that contains secrets.

    Raises:
        ConfigError: it contains a user, a password or a query, or chains URLs that may.
    """
    if "::" in url:  # fsspec chains file systems
        raise ConfigError(
            "a URL with :: chains file systems, which is not supported; pass the URL of the remote "
            "alone, like s3://bucket/job or file:///copies"
        )
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"the URL of {parts.scheme}://.../{parts.path.strip('/')} contains a user, a password "
            "or a query; put credentials into the environment, which is not logged"
        )


def parse_protocol(url: str) -> str:
    """Return the protocol of a remote's URL, as it is spelled there.

    Raises:
        ConfigError: it is not the URL of a folder, contains secrets, or has a relative path.
    """
    refuse_credentials(url)
    protocol, separator, where = url.partition("://")
    if not separator or not where.strip("/"):
        raise ConfigError(
            f"{url!r} is not the URL of a folder; pass one like s3://bucket/job or file:///copies"
        )
    if protocol not in LOCAL and "//" in where.rstrip("/"):  # stores write there and list nothing
        raise ConfigError(f"{url!r} has an empty name between two slashes; remove one of them")
    if protocol in LOCAL and not where.startswith(("/", "~/")):
        raise ConfigError(
            f"{url!r} has no full path, so each process would look in a folder of its own; pass "
            f"one like {protocol}:///copies/job, with three slashes"
        )
    return protocol


class Remote:
    """The steps of one job in a remote, in the folder at ``url``.

    Raises:
        ConfigError: the URL cannot be used, or a package for it is missing.
    """

    def __init__(self, url: str) -> None:
        protocol = parse_protocol(url)
        self.url = url.rstrip("/")
        local = {"auto_mkdir": True} if protocol in LOCAL else {}
        options = {"use_listings_cache": False, **local}
        try:
            self._fs: fsspec.AbstractFileSystem
            self._fs, self._base = url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"{protocol}:// needs a package that {sys.prefix} lacks ({error}); for S3: pip "
                "install 'trinity-sync[s3]', for a stack: uv tool install 'trinity-sync[stack,s3]'"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{url!r} cannot be used: {error}") from error

    @property
    def folder(self) -> Path | None:
        """Local folder of the remote, whatever the form of its URL; None if it is not local."""
        return Path(self._base) if isinstance(self._fs, LocalFileSystem) else None

    def require_outside(self, root: Path) -> None:
        """Require that the remote is not in the root: removing a copy would remove the step itself.

        Raises:
            ConfigError: it is the root's folder, by whatever path, or in it.
        """
        if self.folder is None or not root.exists():
            return
        for each in (self.folder, *self.folder.parents):
            if each.exists() and each.samefile(root):
                raise ConfigError(
                    f"{self.url} is in the root {root}, whose steps would be removed as copies; "
                    "choose a folder outside of it, on another disk"
                )

    def list_steps(self) -> list[RemoteStep]:
        """Return all steps in the remote by number, committed or not."""
        found = (step_of_folder(name) for name in self._list_names("", "list the steps of"))
        numbers = sorted(number for number in found if number is not None)
        with ThreadPoolExecutor(_PARALLEL_READS, "steps") as pool:
            return list(pool.map(self.read_step, numbers))

    def read_step(self, step: int) -> RemoteStep:
        """Return a step with its state; the step need not exist."""
        try:
            manifest = self.read_manifest(step)
        except ManifestError:
            return RemoteStep(step, None, "corrupted")
        if manifest is None:
            return RemoteStep(step, None, "not committed")
        sizes = self.list_file_sizes(step)
        valid = all(sizes.get(record.path) == record.nbytes for record in manifest.files)
        return RemoteStep(step, manifest, "valid" if valid else "corrupted")

    def iter_newest_first(self) -> Iterator[Manifest]:
        """Yield the manifests of the valid steps, newest first, without superseded ones."""
        steps = self.list_steps()
        for step in (each.step for each in steps if each.state == "corrupted"):
            warn_once(f"leaving out step {step}: see trinity-sync verify {self.url} {step}")
        found = [each.manifest for each in steps if each.manifest]
        left_out = {each.step for each in steps if each.state != "valid"}
        left_out |= find_superseded_steps(found, self.list_runs()).keys()
        counting = [manifest for manifest in found if manifest.step not in left_out]
        yield from sorted(counting, key=lambda each: (each.run, each.step), reverse=True)

    def read_manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a step; None if it is not committed.

        Raises:
            ManifestError: the manifest is torn or was altered.
        """
        content = self.read_file(step, MANIFEST)
        where = f"{self.url}/global_step_{step}/{MANIFEST}"
        return None if content is None else parse_manifest(content, where, step)

    def list_file_sizes(self, step: int) -> dict[str, int]:
        """Return the bytes of every file of a step, by path below the step's folder."""
        folder = self._path(step, "")
        with self._translate_errors(f"list step {step} in"):
            found: dict[str, Any] = self._fs.find(folder, detail=True)
        return {path.removeprefix(folder): info["size"] for path, info in found.items()}

    def remove_step(self, step: int) -> None:
        """Remove a step, its manifest first, so that a partial step never counts as committed."""
        self.remove_manifest(step)
        with self._translate_errors(f"remove step {step} from"):
            self._remove_folder(self._path(step, ""))

    def remove_leftovers(self, step: int, within_s: float) -> None:
        """Remove what a killed upload or removal has left of a step, if no file of it is that new.

        A step with a manifest stays, and all on a store that tells no times.
        """
        folder, gone = self._path(step, ""), suppress(NotImplementedError, FileNotFoundError)
        with self._translate_errors(f"clean up step {step} in"), gone:
            found, now = self._fs.find(folder), time.time()
            times = [self._fs.modified(path).timestamp() for path in found]
            is_in_use = any(is_recent(at, now, within_s) for at in times)
            if not is_in_use and folder + MANIFEST not in found:
                self._remove_folder(folder)

    def remove_others(self, manifest: Manifest) -> None:
        """Remove what another commit of a step has left there; it must have no manifest by now."""
        found = self.list_file_sizes(manifest.step)
        if MANIFEST in found:  # which a read has just not found
            raise RemoteError(f"step {manifest.step} in {self.url} has a manifest by now; retry")
        for path in found.keys() - {record.path for record in manifest.files}:
            if not path.startswith(f"{UPLOADED}/"):
                with self._translate_errors(f"remove {path} of step {manifest.step} from"):
                    self._fs.rm_file(self._path(manifest.step, path))

    def remove_manifest(self, step: int) -> None:
        """Remove the manifest of a step."""
        path = self._path(step, MANIFEST)
        with self._translate_errors(f"remove the manifest of step {step} from"):
            self._fs.rm_file(path)
            if self.folder:  # files are replaced next
                sync_folder(Path(path).parent)

    def read_identity(self) -> JobIdentity | None:
        """Return the identity of the job whose steps are here; None if no job has written any.

        Raises:
            RemoteError: the file is torn.
        """
        content, where = self._read(IDENTITY_FILE), f"{self.url}/{IDENTITY_FILE}"
        try:
            return None if content is None else decode_record(JobIdentity, content, where)
        except ValueError as error:
            raise RemoteError(
                f"{where}, which identifies the job, is torn or edited; replace it by "
                f"{IDENTITY_FILE} of the job's root"
            ) from error

    def create_identity(self, mine: JobIdentity) -> JobIdentity | None:
        """Write the identity of a job, unless there is one; return what is there afterwards."""
        if self._create(IDENTITY_FILE, encode_record(mine).encode()):
            return mine
        return self.read_identity()

    def list_runs(self) -> list[Run]:
        """Return the runs that have sent steps, by number; skip torn records."""
        names = self._list_names(f"/{PRIVATE_FOLDER}/runs", "list the runs of")
        found = (parse_number(name.removesuffix(".json")) for name in names)
        numbers = sorted(number for number in found if number is not None)
        return [run for number in numbers if (run := self._read_run(number))]

    def create_run(self, run: Run) -> Run | None:
        """Create the record of a run; return the run that has its number, None if it is torn."""
        content = encode_record(run).encode()
        if self._create(f"{PRIVATE_FOLDER}/runs/{run.number}.json", content):
            return run
        return self._read_run(run.number)

    def supports_exclusive_create(self) -> bool:
        """Return whether the remote refuses a second write of a file that must be created once.

        Raises:
            RemoteError: the remote cannot be written.
        """
        name = f"{PRIVATE_FOLDER}/probes/{uuid.uuid4().hex}"
        self._create(name, b"probe")
        once = not self._create(name, b"again")
        with self._translate_errors("clean up in"):
            self._fs.rm_file(f"{self._base}/{name}")
        return once

    def _read_run(self, number: int) -> Run | None:
        name = f"{PRIVATE_FOLDER}/runs/{number}.json"
        try:
            run = decode_record(Run, self._read(name) or b"", f"{self.url}/{name}")
        except ValueError:
            return None
        return run if run.number == number else None

    def read_file(self, step: int, name: str) -> bytes | None:
        """Return the content of a small file below a step's folder; None if there is none."""
        return self._read(f"global_step_{step}/{name}")

    def write_file(self, step: int, name: str, content: bytes) -> None:
        """Write a small file below a step's folder in one request; in a local folder, durably."""
        path = self._path(step, name)
        with self._translate_errors(f"write {name} of step {step} to"):
            if self.folder:
                make_folder(Path(path).parent)
                replace_file(Path(path), content)
            else:
                self._fs.pipe_file(path, content)

    def create_file(self, step: int, name: str, content: bytes) -> bool:
        """Create a small file below a step's folder in one request; return False if it exists."""
        return self._create(f"global_step_{step}/{name}", content)

    def read_chunks(self, step: int, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file below a step's folder, in chunks as they arrive."""
        with (
            self._translate_errors(f"read {name} of step {step} in"),
            self._fs.open(
                self._path(step, name), "rb", block_size=CHUNK, cache_type="readahead"
            ) as file,
        ):
            while chunk := file.read(CHUNK):
                yield chunk

    def find_mismatch(self, step: int, record: FileRecord, on_read: Callable[[int], object]) -> str:
        """Read a file and return why it differs from its record; empty if it does not.

        ``on_read`` is called with the number of bytes of each chunk.
        """
        digest = xxhash.xxh3_128()
        try:
            for chunk in self.read_chunks(step, record.path):
                digest.update(chunk)
                on_read(len(chunk))
        except RemoteError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return "is missing"
            raise
        return "" if f"{DIGEST}:{digest.hexdigest()}" == record.digest else "has other bytes"

    def upload_file(self, step: int, name: str, chunks: Iterator[bytes], nbytes: int) -> None:
        """Write a file of ``nbytes`` below a step's folder in chunks; if that fails, discard them.

        In a local folder it is durable.

        Raises:
            RemoteError: the file cannot be written, or has another size afterwards.
        """
        path = self._path(step, name)
        part = max(CHUNK, nbytes // _MOST_PARTS)
        with self._translate_errors(f"write {name} of step {step} to"):
            if self.folder:
                make_folder(Path(path).parent)
                Path(path).unlink(missing_ok=True)  # equal files are links to one
            file = self._fs.open(path, "wb", block_size=part)
            try:
                for chunk in chunks:
                    file.write(chunk)
            except BaseException:
                if isinstance(file, AbstractBufferedFile):  # closing would complete a partial file
                    file.closed = True
                    file.discard()
                raise
            file.close()
            if self.folder:
                sync_file(Path(path))
            found = self._fs.info(path)["size"]
        if found != nbytes:
            raise RemoteError(
                f"{self.url}/global_step_{step}/{name} has {found:,} bytes after its upload "
                f"instead of {nbytes:,}; repeat the upload"
            )

    def copy_file(self, source: tuple[int, str], step: int, name: str) -> bool:
        """Copy a file of a step, here, to one of another; return False if no file can be copied."""
        there, target = self._path(*source), self._path(step, name)
        with self._translate_errors(f"copy {source[1]} of step {source[0]} in"):
            if self.folder:
                make_folder(Path(target).parent)
                Path(target).unlink(missing_ok=True)
                link_or_copy(Path(there), Path(target))
                sync_file(Path(target))
                return True
            try:
                self._fs.cp_file(there, target)
            except NotImplementedError:
                return False
        return True

    def record_upload(self, step: int, record: FileRecord) -> None:
        """Record a complete file, so that an interrupted upload resumes after it."""
        with self._translate_errors(f"check {record.path} of step {step} in"):
            content = self._describe_upload(step, record)
        self.write_file(step, f"{UPLOADED}/{record.path}", content)

    def is_uploaded(self, step: int, record: FileRecord) -> bool:
        """Return whether a file was uploaded and recorded, and is unchanged since."""
        found, gone = self.read_file(step, f"{UPLOADED}/{record.path}"), suppress(FileNotFoundError)
        with self._translate_errors(f"check {record.path} of step {step} in"), gone:
            return found is not None and found == self._describe_upload(step, record)
        return False

    def _describe_upload(self, step: int, record: FileRecord) -> bytes:
        state = str(self._fs.ukey(self._path(step, record.path)))
        return encode_record(_Uploaded(record.nbytes, record.digest, state)).encode()

    def remove_upload_records(self, step: int) -> None:
        """Remove the upload records of a step that is committed."""
        with self._translate_errors(f"clean up step {step} in"), suppress(FileNotFoundError):
            self._remove_folder(self._path(step, UPLOADED))

    def _read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        with self._translate_errors(f"read {name} in"):
            try:
                content: bytes = self._fs.cat_file(f"{self._base}/{name}")
            except FileNotFoundError:
                return None
        return content

    def _create(self, name: str, content: bytes) -> bool:
        """Create a small file in one request; return False if it exists.

        If that fails, what is there is compared by the caller, whether or not this call wrote it.
        """
        path = f"{self._base}/{name}"
        with self._translate_errors(f"write {name} to"):
            if self.folder:  # complete or absent, as in an object store
                make_folder(Path(path).parent)
                return create_file(Path(path), content)
            try:
                self._fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if self._fs.exists(path):  # not all stores name the condition that they refuse by
                    return False
                if error.errno != errno.ENOSYS:
                    raise
                self._fs.pipe_file(path, content)  # the store has no conditional writes
        return True

    def _list_names(self, folder: str, what: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        with self._translate_errors(what):
            try:
                names = self._fs.ls(self._base + folder, detail=False)
            except FileNotFoundError:
                return []
        return [name.rstrip("/").rpartition("/")[2] for name in names]

    def _remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it, and nothing else, whatever its path."""
        if self.folder or not has_magic(path):
            self._fs.rm(path, recursive=True)  # many files in one request
            return
        # ``rm`` takes the path for a pattern, which the folders of other jobs may match
        with ThreadPoolExecutor(_PARALLEL_REMOVALS, "remove") as pool:
            list(pool.map(self._fs.rm_file, self._fs.find(path)))
        for empty in sorted(self._fs.find(path, withdirs=True), reverse=True):
            self._fs.rmdir(empty)  # a store that has folders

    def _path(self, step: int, name: str) -> str:
        return f"{self._base}/global_step_{step}/{name}"

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Translate the errors of the libraries behind fsspec into a `RemoteError`."""
        try:
            yield
        except TrinitySyncError:
            raise
        except Exception as error:
            self._fs.clear_instance_cache()  # the next one reads renewed credentials
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RemoteError(
                f"cannot {what} {self.url}: {reason}. Check the URL, and the address and "
                "credentials of the service in the environment, then retry; uploaded files are not "
                "sent again."
            ) from error
