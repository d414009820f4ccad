"""Files of a committed step for code that opens files by name, such as the loaders of DCP.

A later run that commits a step again exchanges its folder, and other users may be able to rename
files in it: what has a file's name when it is checked may not have it when it is read. So a file is
opened once, the open file is checked, and the code gets a path of the open file
(``/proc/self/fd/N``), or a private folder of links to such paths.
"""

import os
import resource
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.fs.direct_io import digest_fd, open_direct
from trinity_sync.fs.lock_file import LockFile
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.safe_load import is_trusted
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.manifest_files import FileRecord
from trinity_sync.storage.restore import make_read_error, require_digest, require_size

_OTHER_FILES = 256
"""Descriptors that the rest of the process may need besides those that it has."""
_PREFIX = "trinity_sync.opened-"
"""Prefix of the names of private folders, each of which its process locks."""
_NEW_S = 60.0
"""Seconds for which a private folder may not be locked yet."""


class OpenFiles:
    """Open files of one commit, for code that opens files by name in this process.

    The files are closed at the end of the block, by `close`, or with the object. Lease the step
    until they are open.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._folder = step_folder(root, manifest.step)
        self._fds: dict[str, int] = {}
        self._opened = ExitStack()
        self.close = weakref.finalize(self, _close, self._opened, os.getpid())

    def open(self, records: Iterable[FileRecord], *, unpickled: bool) -> None:
        """Open files, check their sizes, and if they are ``unpickled`` that they are this user's.

        Raises:
            CommitError: a file cannot be read, has another size, or may be another user's.
        """
        records = [*records]
        _raise_limit(len(records))
        for record in records:
            path = self._folder / record.path
            try:
                fd = self._opened.enter_context(open_direct(path))
            except OSError as error:
                raise make_read_error(path, error) from error
            require_size(path, record, os.fstat(fd).st_size)
            if unpickled and not is_trusted(fd):
                raise CommitError(
                    f"{path} may have been written by another user, and its values besides tensors "
                    "were not unpickled; see docs/operations/security.md"
                )
            self._fds[record.path] = fd

    def compare(self, records: Iterable[FileRecord]) -> None:
        """Compare open files with their digests.

        Raises:
            CommitError: a file is corrupted, or cannot be read.
        """
        for record in records:
            path = self._folder / record.path
            try:
                found = digest_fd(self._fds[record.path], record.nbytes)
            except OSError as error:
                raise make_read_error(path, error) from error
            require_digest(path, record, found)

    def get_path(self, path: str) -> Path:
        """Return a path of the open file at ``path`` in the step; other processes cannot use it."""
        return Path(f"/proc/self/fd/{self._fds[path]}")

    def make_folder(self, name: str, names: Mapping[str, str]) -> Path:
        """Make a private folder of links to open files, which is removed when they are closed.

        ``name`` may have folders above it. ``names`` has paths below the step's folder by paths
        below the new folder.
        """
        _remove_leftovers()
        private = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        self._opened.callback(shutil.rmtree, private, ignore_errors=True)
        in_use = LockFile(private, os.O_RDONLY | os.O_DIRECTORY)
        self._opened.callback(in_use.close)
        in_use.try_acquire(shared=True)
        folder = private / name
        for link, path in names.items():
            (folder / link).parent.mkdir(parents=True, exist_ok=True)
            (folder / link).symlink_to(self.get_path(path))
        return folder

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(opened: ExitStack, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves the folder to its parent
        opened.close()


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            found = path.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _NEW_S:
                with closing(LockFile(path, os.O_RDONLY | os.O_DIRECTORY)) as lock:
                    if lock.try_acquire():
                        shutil.rmtree(path, ignore_errors=True)


def _raise_limit(count: int) -> None:
    """Let this process open so many more files, if the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/proc/self/fd").iterdir())) + count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
