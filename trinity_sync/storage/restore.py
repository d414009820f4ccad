"""Restore of committed files: into states, or as open files for other loaders.

States come from the spool if possible, otherwise from disk. A commit frees the slots, and their
content stays until they are filled again. So a trainer that restarts on its node finds the last
committed step in memory. In both cases the bytes are compared with the digests of the manifest.

Code such as the loaders of DCP opens files by name. A later run that commits a step again exchanges
its folder, and other users may be able to rename files in it: what has a file's name when it is
checked may not have it when it is read. So a file is opened once, the open file is checked, and the
code gets a path of the open file (``/proc/self/fd/N``), or a private folder of links to such paths.

`fill_states` restores into tensors that live: one copy, and no memory besides theirs. Bytes reach a
tensor before the digest of their file is known, so an error on the way says which components have
changed. Everything that can be checked earlier is: all files are opened, and their tensors compared
with the live ones, before the first is filled.
"""

import logging
import os
import resource
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trinity_sync.errors import CommitError, ConfigError, LockTimeoutError, warn_once
from trinity_sync.fs.atomic import is_trusted
from trinity_sync.fs.direct_io import (
    digest_cached_file,
    digest_fd,
    digest_file,
    digest_parts,
    map_fd,
    no_progress,
    open_to_read,
    read_fd,
    scatter_fd,
)
from trinity_sync.fs.file_system import is_recent
from trinity_sync.fs.locks import LockFile
from trinity_sync.layout import EMPTY_FOLDER, step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import hold_slot
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import FileRecord, Manifest
from trinity_sync.tensors.deserialize import is_plain_forced, load_image
from trinity_sync.tensors.dtensors import iter_dtensors
from trinity_sync.tensors.in_place import Filling, plan_copies, plan_filling

logger = logging.getLogger(__name__)

SLOT_S = 30.0
"""Seconds to wait for a slot that a process is filling; the file is also on disk."""

T = TypeVar("T")
Source = Literal["spool", "disk"]


@dataclass(frozen=True)
class RestoredShard:
    """The state in a shard, and where it was read from."""

    state: Any
    """State as from ``torch.load``, all tensors on the CPU."""
    source: Source


def load_shards(
    root: str | Path,
    step: int,
    paths: Sequence[str],
    *,
    spool: JobSpool | None = None,
    borrow: Collection[str] = (),
    manifest: Manifest | None = None,
) -> Generator[RestoredShard, None, None]:
    """Yield the states in shards of a committed step, in order, and read the next ones ahead.

    Files of this user are unpickled as veRL and ``torch.load(weights_only=False)`` do it; files of
    others may contain nothing but tensors and plain values, see ``tensors.deserialize``.

    ``paths`` are below the step's folder, as in its manifest:
    ``actor/model_world_size_1_rank_0.pt``. Without the ``spool`` of the job on this node, files are
    read from disk. If this rank or another one has checked the ``manifest``, pass it: then no file
    but those of ``paths`` is looked at. What several ranks load is read through the page cache:
    once for all ranks of a node.

    The caller only copies from the states of ``borrow``, some of the paths. Their tensors may be
    views of the slot, which costs no memory; they are valid until this generator is closed, and the
    slot is locked until then. Close it before the next save.

    Raises:
        CommitError: the step is not committed, a file is not part of it or corrupted, or a file
            that is not trusted contains more than tensors and plain values.
    """
    folder = step_folder(root, step)
    manifest = manifest or require_committed(root, step)
    records = [_find_record(root, manifest, path) for path in paths]
    files = [
        _ShardFile(folder, record, spool, cached=_is_for_several_ranks(manifest, record))
        for record in records
    ]
    with ExitStack() as opened, ThreadPoolExecutor(1, thread_name_prefix="restore") as ahead:
        for file in files:
            opened.callback(file.close)
        reads = [ahead.submit(_read, file, borrow=file.record.path in borrow) for file in files]
        while reads:  # keep no reference to a state after it was yielded
            yield _unpickle(files[-len(reads)], reads.pop(0).result())


def load_states(
    root: str | Path,
    step: int,
    role: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    manifest: Manifest | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the states that one rank submitted for a role at a committed step, by component.

    Args:
        root: the job's root.
        step: a committed step.
        role: name of the role, e.g. ``actor``.
        rank: number of the rank that submitted the states.
        world_size: number of ranks that saved the role.
        spool: spool of the job on this node, from which files are read if it still has them; None
            reads them from disk.
        manifest: manifest of the step, if it was checked; None reads it, and checks the sizes of
            all files of the step.
        only: components to read; by default all.

    Raises:
        CommitError: the step is not committed, a file is not part of it or corrupted, a file that
            may be another user's contains more than tensors and plain values, or the role has no
            shards of this rank and world size.
        ConfigError: the role has no such component at the step.
        FormatError: another release has committed the step.
    """
    own: Any = {"rank": rank, "world_size": world_size, "spool": spool, "manifest": manifest}
    with open_states(root, step, role, **own, only=only, borrow=False) as states:
        return states


@contextmanager
def open_states(
    root: str | Path,
    step: int,
    role: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    manifest: Manifest | None = None,
    only: Sequence[str] = (),
    besides: Collection[str] = (),
    borrow: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield what `load_states` returns, as views that are valid within the block.

    They are borrowed as in `load_shards`; components ``besides`` are left out.
    """
    manifest = manifest or require_committed(root, step)
    records = _find_own_shards(root, manifest, role, rank, world_size, only)
    paths = {name: record.path for name, record in records.items() if name not in besides}
    wanted = [*paths.values()]
    how: Any = {"spool": spool, "manifest": manifest, "borrow": wanted if borrow else ()}
    with closing(load_shards(root, step, wanted, **how)) as shards:
        states = {name: next(shards).state for name in paths}  # its end would unlock the slots
        saved_by = _count_ranks(manifest, role, world_size)
        if saved_by != world_size and next(iter_dtensors(states), None) is not None:
            raise _refuse_ranks(root, step, role, saved_by, rank, world_size)
        yield states


def _find_own_shards(
    root: str | Path,
    manifest: Manifest,
    role: str,
    rank: int,
    world_size: int,
    only: Sequence[str] = (),
) -> dict[str, FileRecord]:
    """Return the shards that a rank loads of a role at a step, by component, or raise likewise."""
    step, known = manifest.step, manifest.list_components(role)
    wanted = {only} if isinstance(only, str) else {*only} or known
    if known and (unknown := sorted(wanted - known)):
        raise ConfigError(
            f"step {step} in {root}, role {role}, has no component {', '.join(unknown)}: it has "
            f"{', '.join(sorted(known))}"
        )
    of_role = (record for record in manifest.files if record.role == role)
    shards = [record for record in of_role if record.component in wanted & known]
    saved_by = _count_ranks(manifest, role, world_size)
    mine = {
        record.component: record
        for record in shards
        # of one rank: replicated, if others are of several
        if (record.rank, record.world_size) in ((rank, saved_by), (0, 1))
    }
    if world_size != saved_by:  # any number of ranks loads what all of those have alike
        alike = {(r.component, r.digest): r for r in shards if r.component != "extra_state"}
        if not alike or len({component for component, _ in alike}) < len(alike):
            raise _refuse_ranks(root, step, role, saved_by, rank, world_size)
        mine = {name: r for name, r in mine.items() if name == "extra_state" and rank < saved_by}
        if not mine and len(alike) < len({record.component for record in shards}):
            warn_once(
                f"step {step} in {root} was saved by {saved_by} rank(s), so rank {rank} of "
                f"{world_size} gets no extra_state; Checkpoints.load with rank=0 and "
                f"world_size={saved_by} returns that of rank 0"
            )
        mine |= {component: record for (component, _), record in alike.items()}
    if not mine:
        raise CommitError(
            f"step {step} in {root} has no shards of role {role} for rank {rank} of {world_size}; "
            f"{manifest.hint_at_format(role)}trinity-sync show {root} {step} lists its files"
        )
    return mine


def _count_ranks(manifest: Manifest, role: str, default: int) -> int:
    shards = (record for record in manifest.files if record.role == role and record.is_shard)
    return max((record.world_size for record in shards), default=default)


def _refuse_ranks(
    root: str | Path, step: int, role: str, saved_by: int, rank: int, world_size: int
) -> CommitError:
    return CommitError(
        f"step {step} in {root}, role {role}, was saved by {saved_by} rank(s), and this is "
        f"rank {rank} of {world_size}; load it with as many ranks. On any number, "
        "Checkpoints.load_into loads its weights, FSDPCheckpointManager.load_checkpoint "
        f"veRL's states, and dcp.load what trinity-sync export dcp {root} {step} OUT writes"
    )


def _is_for_several_ranks(manifest: Manifest, record: FileRecord) -> bool:
    """Return whether several ranks load a file: it is replicated, or has several names."""
    return any(
        other.world_size > record.world_size
        or (other.digest == record.digest and other.path != record.path)
        for other in manifest.files
        if other.role == record.role and other.is_shard
    )


def load_bytes(
    root: str | Path, step: int, path: str, *, manifest: Manifest | None = None
) -> bytes:
    """Return the bytes of one file of a committed step, compared with its digest.

    Other files of the step are not looked at.

    Raises:
        CommitError: as `load_shards`.
    """
    manifest = manifest or require_committed(root, step, paths=[path])
    record = _find_record(root, manifest, path)
    return bytes(_read(_ShardFile(step_folder(root, step), record, None)))


def restore_folder(root: str | Path, manifest: Manifest, path: str, to: Path) -> None:
    """Copy a folder of a leased step, and compare each copy with its digest.

    Raises:
        CommitError: the step has no such folder, or a file is corrupted or cannot be read.
        ConfigError: ``to`` has files, or cannot be written.
    """
    step = manifest.step
    if to.is_dir() and any(to.iterdir()):
        raise ConfigError(
            f"{path} of step {step} cannot be restored to {to}, which has files; remove them, or "
            "pass a new folder"
        )
    records = [file for file in manifest.files if file.path.startswith(f"{path}/")]
    if not records:
        raise CommitError(
            f"step {step} in {root} has no folder {path}; trinity-sync show {root} {step} lists "
            "its files"
        )
    for record in records:
        source = step_folder(root, step) / record.path
        copy = to / record.path.removeprefix(f"{path}/")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            if copy == to / EMPTY_FOLDER and len(records) == 1:
                continue
            shutil.copyfile(source, copy)
            digest = digest_cached_file(copy)
        except OSError as error:
            if error.filename == str(source):
                raise make_read_error(source, error) from error
            raise ConfigError(
                f"{path} of step {step} cannot be restored to {copy}: {error.strerror}"
            ) from error
        require_digest(source, record, digest)


def _find_record(root: str | Path, manifest: Manifest, path: str) -> FileRecord:
    record = manifest.find_file(path)
    if record is None:
        raise CommitError(
            f"step {manifest.step} in {root} has no file {path}; trinity-sync show {root} "
            f"{manifest.step} lists its files"
        )
    return record


class _ShardFile:
    """The bytes of a committed file: in the first slot that still holds them, otherwise on disk.

    With ``cached``, the disk is read through the page cache. Close it once it is read.
    """

    slot: Path | None = None
    """The slot that is open, or was; None if it is the file."""
    trusted = False
    """Whether it may be unpickled in full."""

    def __init__(
        self, folder: Path, record: FileRecord, spool: JobSpool | None, *, cached: bool = False
    ) -> None:
        self.path, self.record, self._cached = folder / record.path, record, cached
        key = record.role, record.component, record.digest
        self._slots = iter(spool.find_cached_slots(*key) if spool else ())
        self._opened = ExitStack()
        self.fd: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether a slot or the page cache is read."""
        return self._cached or self.slot is not None

    def read(self, work: Callable[[int], tuple[T, str]]) -> tuple[T, str]:
        """Return what ``work`` returns for the descriptor of the first source that is valid.

        Its second result is the digest of the bytes, empty if it has not read them all. The source
        stays open for the next call.

        Raises:
            CommitError: no source is valid: the file is corrupted, or cannot be read.
        """
        start = time.perf_counter()
        while True:
            try:
                result = work(self._open_next() if self.fd is None else self.fd)
            except (OSError, LockTimeoutError) as error:
                if isinstance(error, OSError) and not self.slot:
                    raise make_read_error(self.path, error) from error
                logger.warning("cannot read slot %s, using the file: %s", self.slot, error)
            else:
                if result[1] in ("", self.record.digest):
                    break
                if not self.slot:
                    require_digest(self.path, self.record, result[1])
                logger.warning("slot %s no longer holds %s", self.slot, self.record.path)
            self.close()
        if result[1]:
            seconds, gigabytes = time.perf_counter() - start, self.record.nbytes / 1e9
            source = "spool" if self.slot else "disk"
            logger.info("%s: %.2f GB from the %s in %.2f s", self.path, gigabytes, source, seconds)
        return result

    def _open_next(self) -> int:
        self.slot = next(self._slots, None)
        if self.slot:
            source = hold_slot(self.slot, limit_s=SLOT_S)
        else:
            source = open_to_read(self.path, direct=not self._cached)
        self.fd = fd = self._opened.enter_context(source)
        self.trusted = is_trusted(fd)
        if not self.slot:
            require_size(self.path, self.record, os.fstat(fd).st_size)
        return fd

    def close(self) -> None:
        """Close the source that is open."""
        self.fd = None
        self._opened.close()


def _read(file: _ShardFile, *, borrow: bool = False) -> memoryview:
    """Return the bytes of a file; with ``borrow``, a mapping of its slot, which stays open."""
    nbytes = file.record.nbytes

    def read(fd: int) -> tuple[memoryview, str]:
        if borrow and file.slot:
            image = map_fd(fd, nbytes)
            return image, digest_parts((image,))
        return read_fd(fd, nbytes)

    image, _ = file.read(read)
    if not borrow:
        file.close()
    return image


def _unpickle(file: _ShardFile, image: memoryview) -> RestoredShard:
    state = load_image(image, file.path, trusted=file.trusted)
    return RestoredShard(state, "spool" if file.slot else "disk")


def make_read_error(path: Path, error: OSError) -> CommitError:
    """Return the error of a file of a step that cannot be read."""
    return CommitError(
        f"{path} cannot be read: {error.strerror}. Repair that, or load another step "
        "(trinity-sync ls lists them)."
    )


def require_size(path: Path, record: FileRecord, nbytes: int) -> None:
    """Raise `CommitError` if a file has not the size of its record: digests end with that."""
    _require(path, nbytes == record.nbytes, f"it has {nbytes:,} bytes", f"{record.nbytes:,}")


def require_digest(path: Path, record: FileRecord, found: str) -> None:
    """Raise `CommitError` if a file has not the digest of its record."""
    _require(path, found == record.digest, f"its digest is {found}", record.digest)


def _require(path: Path, is_valid: bool, found: str, recorded: str) -> None:
    if not is_valid:
        raise CommitError(
            f"{path} is corrupted: {found}, the manifest says {recorded}. Restore the file from a "
            "copy, or load another step (trinity-sync ls lists them)."
        )


def require_digests(
    folder: Path, records: Iterable[FileRecord], on_read: Callable[[int], object] = no_progress
) -> None:
    """Read the files of a step's folder; raise `CommitError` if a digest is not its record's."""
    for record in records:
        path = folder / record.path
        require_digest(path, record, digest_file(path, record.nbytes, on_read))


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
        self._files: dict[str, _ShardFile] = {}
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
            file = _ShardFile(self._folder, record, None, cached=True)  # it is loaded afterwards
            self._opened.callback(file.close)
            self._files[record.path] = file
            file.read(lambda fd: (fd, ""))  # opens it
            if unpickled and not file.trusted:
                raise CommitError(
                    f"{file.path} may have been written by another user, and its values besides "
                    "tensors were not unpickled; see docs/operations/security.md"
                )

    def compare(self, records: Iterable[FileRecord]) -> None:
        """Compare open files with their digests.

        Raises:
            CommitError: a file is corrupted, or cannot be read.
        """
        for record in records:
            file = self._files[record.path]
            file.read(lambda fd: (fd, digest_fd(fd, file.record.nbytes)))  # noqa: B023

    def get_path(self, path: str) -> Path:
        """Return a path of the open file at ``path`` in the step; other processes cannot use it."""
        return Path(f"/proc/self/fd/{self._files[path].fd}")

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
            if found.st_uid == os.geteuid() and not is_recent(found.st_mtime, time.time(), _NEW_S):
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


def fill_states(
    root: str | Path,
    manifest: Manifest,
    role: str,
    live: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    only: Sequence[str] = (),
    run_together: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> dict[str, Any]:
    """Fill live states, by component, from a step, and return those of the step.

    Live tensors are in the place of the saved ones; an object with a ``load_state_dict`` is left to
    the caller. What has to succeed on all ranks before any of them goes on is passed to
    ``run_together``.

    Raises:
        CommitError: as `load_states`; the message says which components have changed.
        ConfigError: the step has no such component, or other tensors; nothing was changed.
    """
    folder, shards = step_folder(root, manifest.step), list[_LiveShard]()

    def plan_all() -> None:
        records = _find_own_shards(root, manifest, role, rank, world_size, only)
        if unknown := sorted(live.keys() - records.keys()):
            raise ConfigError(
                f"step {manifest.step} in {root}, role {role}, has no component "
                f"{', '.join(unknown)} to fill: it has {', '.join(records)}"
            )
        for name, state in live.items():
            if hasattr(state, "load_state_dict"):  # which the caller calls
                continue
            cached = _is_for_several_ranks(manifest, records[name])
            file = _ShardFile(folder, records[name], spool, cached=cached)
            opened.callback(file.close)
            shards.append(_LiveShard(file, state))

    with ExitStack() as opened:
        run_together(plan_all)
        return run_together(lambda: _fill_all(shards))


def _fill_all(shards: Sequence["_LiveShard"]) -> dict[str, Any]:
    states = {}
    for number, shard in enumerate(shards):
        try:
            states[shard.component] = shard.fill()
        except Exception as error:
            done, rest = (
                ", ".join(each.component for each in part) or "none"
                for part in (shards[:number], shards[number + 1 :])
            )
            raise CommitError(
                f"{error} Tensors of {shard.component} have changed and hold no step's state; "
                f"filled before: {done}; unchanged: {rest}."
            ) from error
    return states


class _LiveShard:
    """The shard of one component, and the live state that is filled from it."""

    def __init__(self, file: _ShardFile, live: Any) -> None:
        self.component = file.record.component
        self._file, self._live = file, live
        self._planned: tuple[Filling, str] | None = file.read(self._plan)

    def _plan(self, fd: int) -> tuple[Filling, str]:
        """Plan how to fill the live state; return the digest as well if that took all bytes.

        Raises:
            ConfigError: the tensors differ.
        """
        record, path = self._file.record, self._file.path
        if self._file.trusted and not is_plain_forced():
            try:
                return plan_filling(map_fd(fd, record.nbytes), self._live), ""
            except ConfigError:
                raise
            except Exception as error:  # bytes that are not yet compared may raise anything
                logger.info("%s cannot be read in place: %s", path, error)
        image, digest = read_fd(fd, record.nbytes)
        if digest != record.digest:
            return Filling(None), digest
        return plan_copies(load_image(image, path, trusted=self._file.trusted), self._live), digest

    def fill(self) -> Any:
        """Fill the live state; return the step's, with live tensors at the places of its own.

        Raises:
            CommitError: the file is corrupted, or cannot be read.
        """
        filling, _ = self._file.read(self._fill)
        filling.finish()
        return filling.state

    def _fill(self, fd: int) -> tuple[Filling, str]:
        filling, digest = self._planned or self._plan(fd)
        self._planned = None  # the next source is another file
        if digest:
            return filling, digest
        nbytes = self._file.record.nbytes
        if self._file.in_memory and filling.is_in_memory:
            return filling, scatter_fd(fd, nbytes, filling.places)
        return filling, digest_fd(fd, nbytes, filling.put)
