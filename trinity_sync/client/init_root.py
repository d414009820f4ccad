"""Check and open the root of a job, and set its settings, before a step is loaded or trained.

Rank 0 probes the capabilities of the file system, and fetches the newest step of a required remote.
One rank of each other node then checks that its root is the same: a file that rank 0 has created
and locked has to exist there, and to be locked. All ranks raise the same error. While rank 0 works,
the ranks run a collective every minute, so none of them exceeds a collective's time-out.

A commit relies on a few operations of the file system. Its type, version and mount options say
little about them, so each operation is tried in the root, which takes some milliseconds (two disk
syncs) and leaves nothing behind. Only mounts of object stores are recognized by their type: their
renames look atomic, and are copies. A root without a required capability is refused before the
training begins. What only makes a save faster (hard links, an exchange of folders, direct I/O,
leases) is tried where it is used, and done another way if it fails.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trinity_sync.client.collective import gather_from_ranks
from trinity_sync.client.run_context import find_start_key
from trinity_sync.errors import ConfigError, RootError, TrinitySyncError, describe_error
from trinity_sync.fs.atomic import (
    NO_ROOM,
    TEMPORARY_SUFFIX,
    UNWRITABLE,
    make_temporary_path,
    open_fd,
    revalidate_folder,
    sync_folder,
)
from trinity_sync.fs.file_system import Mount, find_mount, is_recent
from trinity_sync.fs.locks import acquire_file_lock, try_acquire_file_lock
from trinity_sync.layout import check_root, check_type, refuse_url, steps_on_disk
from trinity_sync.retention.policies import WITHOUT_METRICS, parse_policy, refuse_metrics
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import job_id, open_identity
from trinity_sync.storage.job_settings import JobSettings, read_job_settings, write_job_settings
from trinity_sync.storage.placement import NodeRanks, group_by_node
from trinity_sync.storage.steps_in_use import warn_unwritable

VISIBLE_S = 30.0
"""Seconds within which a node has to see a file that another has created: by default, NFS may keep
an old listing for as long (``acdirmin``)."""
ROUND_S = 60.0
"""Seconds between two collectives while rank 0 fetches a step, which may take longer than the
time-out of a collective."""
PROBES = ("probe", "meeting", "doctor")
"""Prefixes of the temporary folders and files of probes in a root: ``.probe.*.tmp``."""
_LEFTOVER_S = 3600.0
"""Age in seconds from which such a file was left by a killed process."""


@dataclass(frozen=True)
class _Rank:
    """What each rank sends to the others."""

    root: str
    node: str
    spool: str
    key: str
    job: str
    """Identifier of the job; empty on other ranks than 0, which may not see it yet."""
    proof: Path | None
    """The file of rank 0 that the other nodes look for; None on other ranks."""


def resolve_root(root: str | Path) -> Path:
    """Return the full path of a job's root, and create the folder if it is missing.

    Raises:
        ConfigError: as `check_root`, or it cannot be created.
    """
    check_root(root)
    folder = Path(os.path.realpath(root))  # before Python 3.13, resolve() raises for a loop
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the job's root {folder}: {error.strerror}") from error
    return folder


def open_root(root: str | Path, job: Mapping[str, Any] | None = None) -> Path:
    """Create and check a job's root, and return its full path.

    The job's settings in ``job`` are changed. One process of the job calls it. With a required
    remote, the remote's newest step is in the root afterwards. A root with steps that cannot be
    written, or have no room, can be loaded from; a warning says so.

    Raises:
        ConfigError: as `resolve_root`, or a setting of the job is invalid.
        RootError: the file system lacks an operation that a commit needs, or the root has no steps
            and cannot be written.
        RemoteError: the remote cannot be read or written.
        CommitError: the root has another step of the number of the remote's newest.
    """
    folder = resolve_root(root)
    try:
        require_capabilities(folder)
    except RootError as error:
        if not _is_unwritable(error.__cause__) or not steps_on_disk(folder):
            raise
        warn_unwritable(folder, getattr(error.__cause__, "strerror", ""))
        with suppress(OSError):
            set_job_settings(folder, job or {})
        return folder
    settings = set_job_settings(folder, job) if job else read_job_settings(folder)
    if url := settings.required_remote:
        from trinity_sync.remote.required import init_required_remote  # imports fsspec

        init_required_remote(folder, url)
    open_identity(folder)
    return folder


def open_together(
    root: str | Path,
    settings: Settings,
    key: str,
    *,
    job: Mapping[str, Any] | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[tuple[NodeRanks, ...], str]:
    """Open a job's root on all ranks of the default process group; a collective call.

    Return the ranks of each node, and rank 0's run key. Rank 0 calls ``check`` first; its ``job``,
    the settings to change, are used.

    Raises:
        RootError: on all ranks: the ranks name different roots, or their nodes do not share the
            root.
        TrinitySyncError: on all ranks: what ``check`` or `open_root` has raised on rank 0.
    """
    rank = dist.get_rank()

    def open_checked() -> Path:
        if check:
            check()
        return open_root(root, job)

    opened = None if rank else ThreadPoolExecutor(1, "open-root").submit(open_checked)
    while any(gather_from_ranks(opened is not None and not wait([opened], ROUND_S).done)):
        pass
    with ExitStack() as held:
        everyone: list[Any] = gather_from_ranks(_introduction(root, settings, key, opened, held))
        if failures := [each for each in everyone if isinstance(each, TrinitySyncError)]:
            raise failures[0]
        first: _Rank = everyone[0]
        for other, each in enumerate(everyone):
            if each.root != first.root:
                raise RootError(
                    f"rank {other} on node {each.node} has the root {each.root}, and rank 0 has "
                    f"{first.root}; pass the same full path on all ranks"
                )
        places = group_by_node([(each.node, f"{each.spool}/{first.job}") for each in everyone])
        if len(places) > 1 and first.proof:
            looks = any(place.ranks[0] == rank for place in places[1:])  # one of each node
            why = _why_another(first.proof, first.node, settings.node) if looks else ""
            if rank == 0:
                why = _why_late(first.proof.parent, settings.node)
            if any(wrong := gather_from_ranks(why)):
                raise RootError("; ".join([each for each in wrong if each][:3]))
    return places, first.key


def _introduction(
    root: str | Path, settings: Settings, key: str, opened: Future[Path] | None, held: ExitStack
) -> _Rank | TrinitySyncError:
    """Return what this rank sends to the others: its error as well, since they wait for it."""
    try:
        refuse_url(root)
        spool = str(settings.spool.absolute())
        job = job_id(opened.result()) if opened else ""
        key = find_start_key(opened.result(), key) if opened else key
        proof = held.enter_context(_proof(opened.result())) if opened else None
        return _Rank(str(Path(root).resolve()), settings.node, spool, key, job, proof)
    except TrinitySyncError as error:
        return error
    except Exception as error:
        return RootError(f"{root} cannot be the root of a job: {describe_error(error)}")


@contextmanager
def _proof(root: Path) -> Iterator[Path | None]:
    """Yield the path of a locked file of this process; None in a root that cannot be written."""
    path = make_temporary_path(root / "meeting")
    with ExitStack() as held:
        try:
            held.enter_context(acquire_file_lock(path))
        except OSError as error:
            if not _is_unwritable(error):
                raise
            yield None
            return
        held.callback(path.unlink, missing_ok=True)
        yield path


def _is_unwritable(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in UNWRITABLE


def _why_another(proof: Path, theirs: str, mine: str) -> str:
    """Return why this node's root is not that of rank 0; empty if it is. It raises nothing."""
    root, deadline = proof.parent, time.monotonic() + VISIBLE_S
    try:
        while not proof.exists():
            revalidate_folder(root)
            if time.monotonic() > deadline:
                return (
                    f"node {mine} does not see in {root} ({find_mount(root)}) what rank 0 has "
                    f"written there on node {theirs}. The root has to be on a file system that all "
                    "nodes share; otherwise run the job on one node and copy its steps to a remote"
                )
            time.sleep(0.05)
        with try_acquire_file_lock(proof) as free:
            if free:
                mount = find_mount(root)
                option = mount.local_lock_option and f" with the option {mount.local_lock_option}"
                return (
                    f"node {mine} acquired a lock in {root} that node {theirs} holds: locks of "
                    f"this file system ({mount}{option}) do not reach other nodes, and two commits "
                    "could collide. Mount it with such locks (NFS: without nolock and local_lock, "
                    "Lustre: with flock), or use another file system"
                )
        if late := _why_late(root, mine):
            return late
        require_capabilities(root)
    except Exception as error:
        return f"on node {mine}: {error}"
    return ""


def _why_late(root: Path, mine: str) -> str:
    if late := (mount := find_mount(root)).weak_consistency_option:
        return (
            f"node {mine} has mounted {mount.point} with the option {late}, so it would see "
            "commits and removals of other nodes late; mount it without the option"
        )
    return ""


def set_job_settings(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    """Change settings of a job in its root; those that are not named stay as they are.

    Args:
        root: the job's root, which exists.
        changes: values by name, as in `JobSettings`; None restores the default.

    Returns:
        The settings of the job.

    Raises:
        ConfigError: a name is unknown, or a value is invalid; nothing was changed.
    """
    check_type("job", changes, Mapping, "a dict, such as {'keep': 'last=3'}")
    for name in ("keep", "keep_model", "keep_weights", "keep_quarantine", "remote_keep"):
        if changes.get(name) is not None:
            parse_policy(str(changes[name]))
    for name in WITHOUT_METRICS:
        refuse_metrics(name, str(changes.get(name)))
    if remote := changes.get("remote"):
        from trinity_sync.remote.remote_root import LOCAL, Remote, parse_protocol  # import fsspec

        if parse_protocol(str(remote)) in LOCAL:  # others may need packages of the stack
            Remote(str(remote)).require_outside(Path(root))
    return write_job_settings(root, changes)


@dataclass(frozen=True)
class Capability:
    """An operation that a commit needs, and whether the file system supports it."""

    name: str
    reason: str
    """Reason why it is not supported; empty if it is."""
    consequence: str
    """Consequence if it is not supported."""


@dataclass(frozen=True)
class Capabilities:
    """Result of the probe of a root."""

    root: Path
    mount: Mount
    each: tuple[Capability, ...]


def require_capabilities(root: Path) -> Capabilities:
    """Probe a root, and require what a commit needs.

    Raises:
        RootError: the root cannot be written, or lacks a required capability.
    """
    found = probe_capabilities(root)
    if lacking := [each for each in found.each if each.reason]:
        raise RootError(
            f"{root} cannot be the root of a job. Its file system ({found.mount}) has no "
            + "; no ".join(f"{a.name} ({a.reason}), so {a.consequence}" for a in lacking)
            + ". Choose a folder on a local disk, or on a shared file system with POSIX semantics; "
            "for an object store, set a remote of the job and keep the root on a disk."
        )
    return found


def probe_capabilities(root: Path) -> Capabilities:
    """Probe a root, and leave it unchanged.

    Raises:
        RootError: the root cannot be written.
    """
    folder = root / f".probe.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        folder.mkdir(0o700)  # another user of the root may move it, but puts no link into it
        with open_fd(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
            found, own = os.fstat(fd), Path(f"/proc/self/fd/{fd}")
            if found.st_uid != os.geteuid() and not find_mount(root).shared:
                raise OSError(errno.EPERM, f"another user has replaced {folder}")
            _remove_leftovers(root, now=found.st_mtime)
            each = tuple(
                Capability(name, _find_failure(attempt, own), without)
                for name, attempt, without in _ATTEMPTS
            )
    except OSError as error:
        action = "Change its owner or mode, mount it for writing"
        if error.errno in NO_ROOM:
            action = "Free space there"
        raise RootError(
            f"{root} ({find_mount(root)}) cannot be written: {error.strerror}. {action}, or "
            "choose another root."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Capabilities(root, find_mount(root), each)


class _Unsupported(Exception):
    """The operation had no error, and did not do what it is for."""


def _find_failure(attempt: Callable[[Path], None], folder: Path) -> str:
    own = folder / attempt.__name__
    try:
        own.mkdir()
        attempt(own)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return error.strerror or type(error).__name__
    except _Unsupported as error:
        return str(error)
    return ""


def _try_exclusive_create(folder: Path) -> None:
    (folder / "one").touch(exist_ok=False)
    with suppress(FileExistsError):
        (folder / "one").touch(exist_ok=False)
        raise _Unsupported("a file was created twice")


def _try_sync(folder: Path) -> None:
    with (folder / "file").open("xb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _try_replace(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    before = new.stat()
    new.replace(old)
    after = old.stat()
    if old.read_bytes() != b"new" or new.exists():
        raise _Unsupported("the old file still existed, or the new file existed twice")
    if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise _Unsupported("the rename made a copy")


def _try_move(folder: Path) -> None:
    if (mount := find_mount(folder)).is_object_store:
        raise _Unsupported(f"{mount.kind} copies the files of a folder one by one")
    (folder / "old/below").mkdir(parents=True)
    (folder / "old/below/file").write_bytes(b"x")
    (folder / "old").rename(folder / "new")
    if (folder / "new/below/file").read_bytes() != b"x" or (folder / "old").exists():
        raise _Unsupported("the folder was incomplete after the rename")


def _try_locks(folder: Path) -> None:
    for shared in (True, False):
        with (
            acquire_file_lock(folder / "lock", shared=shared) as lock,
            try_acquire_file_lock(folder / "lock") as both,
        ):
            if both or not lock.try_acquire_range():  # of bytes, as commits take it as well
                raise _Unsupported("a lock was acquired twice")


_ATTEMPTS: tuple[tuple[str, Callable[[Path], None], str], ...] = (
    ("exclusive create", _try_exclusive_create, "two runs could get the same number"),
    ("sync to disk", _try_sync, "a committed step could be gone after a power cut"),
    ("atomic rename of a file", _try_replace, "a manifest or a pointer could be seen torn"),
    ("atomic rename of a folder", _try_move, "a step could be seen half removed"),
    ("locks between processes", _try_locks, "two commits or removals could cross"),
)


def _remove_leftovers(root: Path, now: float) -> None:
    for left in (each for name in PROBES for each in root.glob(f".{name}.*{TEMPORARY_SUFFIX}")):
        with suppress(FileNotFoundError):  # another probe removes it
            if is_recent(left.stat().st_mtime, now, _LEFTOVER_S):
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
