"""What becomes of a root when a job begins, before anything is trained or loaded.

Rank 0 tries out what the file system can do, and fetches the newest step of a store. Ranks on other
nodes then see whether theirs is the same: a file that rank 0 has made and locked must be there, and
locked. Whatever is wrong is raised on all ranks alike, so none of them waits for one that has gone;
and they meet again and again while rank 0 is at it, so none waits for longer than a collective may.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trinity_sync.errors import ConfigError, RootError, TrinitySyncError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, revalidate_folder
from trinity_sync.fs.capabilities import require_capabilities
from trinity_sync.fs.locks import acquire_file_lock, try_acquire_file_lock
from trinity_sync.fs.mounts import find_mount
from trinity_sync.layout import job_id, refuse_url
from trinity_sync.settings import Settings
from trinity_sync.storage.placement import NodeRanks, group_by_node
from trinity_sync.storage.required_remote import read_required_remote

VISIBLE_S = 30.0
"""Seconds within which a node has to see what another has made: NFS may keep an old listing for as
long by default (``acdirmin``)."""


ROUND_S = 60.0
"""Seconds after which ranks meet again while rank 0 fetches a step, which may take longer than the
time-out of a collective."""


@dataclass(frozen=True)
class _Rank:
    """What a rank tells the others of itself."""

    root: str
    node: str
    spool: str
    key: str
    proof: Path | None
    """Of rank 0: the file that the other nodes look for."""


def resolve_root(root: str | Path) -> Path:
    """The full path of a job's root, made if it is missing.

    Raises:
        ConfigError: it is a URL, or cannot be made.
    """
    refuse_url(root)
    folder = Path(root).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the job's root {folder}: {error.strerror}") from error
    return folder


def open_root(root: str | Path, settings: Settings) -> Path:
    """Have a root that a job can begin with; one process of the job does it.

    Where a remote is required, its newest step is here afterwards.

    Raises:
        ConfigError: it is a URL, or cannot be made; or the store's URL cannot be used.
        RootError: its file system lacks what a commit needs.
        RemoteError: the store cannot be read and written.
        CommitError: another step has the place of the store's newest.
    """
    folder = resolve_root(root)
    require_capabilities(folder)
    if url := settings.remote_of(folder) * settings.remote_required or read_required_remote(folder):
        from trinity_sync.remote.required import init_required_remote  # fsspec, for who needs it

        init_required_remote(folder, url)
    return folder


def open_together(
    root: str | Path, settings: Settings, key: str, *, check: Callable[[], None] | None = None
) -> tuple[tuple[NodeRanks, ...], str]:
    """As `open_root`, by all ranks of the default process group.

    Args:
        root: of the job.
        settings: of this process.
        key: of the run, if this is rank 0.
        check: called on rank 0 first.

    Returns:
        On which nodes the ranks are, and rank 0's key.

    Raises:
        RootError: the ranks do not name, or their nodes do not see, one and the same root.
        TrinitySyncError: what ``check`` or `open_root` has raised on rank 0.
    """
    rank = dist.get_rank()

    def open_checked() -> Path:
        if check:
            check()
        return open_root(root, settings)

    opened = None if rank else ThreadPoolExecutor(1, "open-root").submit(open_checked)
    while any(_from_all(opened is not None and not wait([opened], ROUND_S).done)):
        pass
    with ExitStack() as held:
        everyone = _from_all(_introduction(root, settings, key, opened, held))
        if failures := [each for each in everyone if isinstance(each, TrinitySyncError)]:
            raise failures[0]
        first: _Rank = everyone[0]
        for other, each in enumerate(everyone):
            if each.root != first.root:
                raise RootError(
                    f"rank {other} on node {each.node} names {each.root} as the root of its job, "
                    f"and rank 0 names {first.root}; give all ranks the same full path"
                )
        places = group_by_node([(each.node, each.spool) for each in everyone])
        if len(places) > 1 and first.proof:
            looks = any(place.ranks[0] == rank for place in places[1:])  # one of each node
            why = _why_another(first.proof, first.node, settings.node) if looks else ""
            if rank == 0:
                why = _why_late(first.proof.parent, settings.node)
            if any(wrong := _from_all(why)):
                raise RootError("; ".join([each for each in wrong if each][:3]))
    return places, first.key


def _from_all(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _introduction(
    root: str | Path, settings: Settings, key: str, opened: Future[Path] | None, held: ExitStack
) -> _Rank | TrinitySyncError:
    """What this rank tells the others; whatever goes wrong, they wait to hear of it."""
    try:
        refuse_url(root)
        spool = (settings.spool / job_id(root)).absolute()
        proof = held.enter_context(_proof(opened.result())) if opened else None
        return _Rank(str(Path(root).resolve()), settings.node, str(spool), key, proof)
    except TrinitySyncError as error:
        return error
    except Exception as error:
        return RootError(f"{root} cannot be the root of a job: {error!r}")


@contextmanager
def _proof(root: Path) -> Iterator[Path]:
    """A file that is there and locked within the block."""
    path = root / f".meeting.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with acquire_file_lock(path):
            yield path
    finally:
        path.unlink(missing_ok=True)


def _why_another(proof: Path, theirs: str, mine: str) -> str:
    """Why the root of this node is not that of rank 0's; empty if it is. Never raises."""
    try:
        if why := (
            _why_not_seen(proof, theirs, mine)
            or _why_not_locked(proof, theirs, mine)
            or _why_late(proof.parent, mine)
        ):
            return why
        require_capabilities(proof.parent)
    except Exception as error:
        return f"on node {mine}: {error}"
    return ""


def _why_late(root: Path, mine: str) -> str:
    if late := (mount := find_mount(root)).weak_consistency_option:
        return (
            f"node {mine} has mounted {mount.point} with the option {late}, and so would see "
            "late what other nodes commit and remove; mount it without"
        )
    return ""


def _why_not_seen(proof: Path, theirs: str, mine: str) -> str:
    deadline = time.monotonic() + VISIBLE_S
    root = proof.parent
    while not proof.exists():
        revalidate_folder(root)
        if time.monotonic() > deadline:
            return (
                f"node {mine} does not see in {root} ({find_mount(root)}) what rank 0 has written "
                f"there on node {theirs}. The root has to be one folder on a file system that all "
                "nodes share; with disks of their own, run each job on one node and copy its steps "
                "(TRINITY_SYNC_REMOTE)"
            )
        time.sleep(0.05)
    return ""


def _why_not_locked(proof: Path, theirs: str, mine: str) -> str:
    root = proof.parent
    with try_acquire_file_lock(proof) as free:
        if free:
            mount = find_mount(root)
            option = (
                f" with the option {mount.local_lock_option}" if mount.local_lock_option else ""
            )
            return (
                f"node {mine} was given a lock in {root} that node {theirs} has: locks of this "
                f"file system ({mount}{option}) do not reach other nodes, and two commits could "
                "cross. Mount it so that they do (NFS: without nolock and local_lock, Lustre: with "
                "flock), or take another file system"
            )
    return ""
