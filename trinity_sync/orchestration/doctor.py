"""Is everything in place for saves on this node? Each answer says what to do where it is not.

Nothing is changed: a probe of the disk is written beside the job's steps and removed at once.
"""

import importlib.metadata
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

import httpx
from packaging.requirements import Requirement

from trinity_sync.errors import RootError, StackError, TrinitySyncError
from trinity_sync.layout import KINDS, job_id, steps_on_disk
from trinity_sync.orchestration import parts, stack
from trinity_sync.orchestration.deploy import deployments
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, job_spools
from trinity_sync.storage.abilities import Abilities, probe
from trinity_sync.storage.durable import TEMPORARY_SUFFIX
from trinity_sync.storage.iteration import read_iteration
from trinity_sync.storage.mounts import mount_of
from trinity_sync.storage.placement import placement
from trinity_sync.storage.recycling import recycles
from trinity_sync.storage.runs import newest_run
from trinity_sync.storage.steps import committed_steps, newest, require_committed
from trinity_sync.storage.stored import must_be_sent, store_of
from trinity_sync.storage.writer import write_file

PROBE_BYTES = 64 << 20
STALE_S = 600.0
SKEW_S = 5.0


@dataclass(frozen=True)
class Check:
    """One answer."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    todo: str = ""


def examine(
    settings: Settings, root: Path | None = None, *, clock: Callable[[], float] = time.time
) -> Iterator[Check]:
    """All checks, each as soon as it is known.

    Args:
        settings: those of this process's environment.
        root: a job to look at, too.
        clock: seconds since the epoch.
    """
    yield from _python()
    yield from _packages()
    yield from _server(settings, clock)
    yield _ray(settings)
    yield from _spool(settings.spool, clock)
    if root is not None:
        yield from _root(root, settings)


# -------------------------------------------------------------------- this process


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    todo = "" if good else "use Python 3.10, 3.11 or 3.12"
    yield Check("python", "ok" if good else "fail", version, todo)


def _packages() -> Iterator[Check]:
    try:
        wanted = importlib.metadata.requires("trinity-sync") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "packages",
            "warn",
            "trinity-sync is imported from a folder, so its requirements are not known",
            "pip install it, which also checks them",
        )
        return
    yield packages_check(wanted)


def packages_check(wanted: list[str]) -> Check:
    """Whether what is installed is in the ranges of these requirements."""
    wrong, right = [], 0
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right += 1
        else:
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        todo = "pip install these versions, or trinity-sync again, which brings them"
        return Check("packages", "fail", "; ".join(wrong), todo)
    return Check("packages", "ok", f"{right} in the supported ranges")


# -------------------------------------------------------------------- Prefect and Ray


def _server(settings: Settings, clock: Callable[[], float]) -> Iterator[Check]:
    import prefect
    from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
    from prefect.exceptions import ObjectNotFound

    from trinity_sync.orchestration.server import heartbeats, server_client, waiting_runs

    state = stack.find(settings)
    url = os.environ.get("PREFECT_API_URL") or (state.api_url if state else None)
    try:
        with server_client(url) as client:
            before = clock()
            answer = client.request("GET", "/admin/version")
            after = clock()
            version = answer.json()
            same = str(version).split(".")[0] == prefect.__version__.split(".")[0]
            yield Check(
                "prefect server",
                "ok" if same else "warn",
                f"version {version} at {client.api_url}; the client's is {prefect.__version__}",
                "" if same else "run a server of the client's major version",
            )
            yield _skew(answer.headers.get("date"), before, after)
            try:
                pool = client.read_work_pool(settings.work_pool)
            except ObjectNotFound:
                found = f"there is no work pool {settings.work_pool}"
                yield Check("work pool", "fail", found, "run: trinity-sync deploy")
                return
            paused = " and paused: resume it in the Prefect UI" if pool.is_paused else ""
            ours = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool.name]))
            there = client.read_deployments(work_pool_filter=ours)
            deployed = {deployment.name for deployment in there}
            missing = [e["name"] for e in deployments() if e["name"] not in deployed]
            yield Check(
                "work pool",
                "fail" if paused or missing else "ok",
                f"{pool.name} of type {pool.type}{paused}"
                + (f"; not deployed: {', '.join(missing)}" if missing else ""),
                "run: trinity-sync deploy" if missing else paused.partition(": ")[2],
            )
            online, waiting = heartbeats(client, pool.name), waiting_runs(client, pool.name)
            yield Check(
                "worker",
                "ok" if online else "fail",
                f"{len(online)} online, {waiting} runs wait for one",
                "" if online else "run: trinity-sync up, or trinity-sync worker on each node",
            )
    except (StackError, httpx.HTTPError, ValueError) as error:
        todo = "run: trinity-sync up, or correct PREFECT_API_URL"
        yield Check("prefect server", "fail", str(error), todo)


def _skew(date: str | None, before: float, after: float) -> Check:
    """The server's clock, to the second, against this node's."""
    if not date:
        return Check("clock", "ok", "the server does not tell the time")
    theirs = parsedate_to_datetime(date).timestamp()
    skew = max(theirs - after, before - (theirs + 1), 0.0)
    if skew <= SKEW_S:
        return Check("clock", "ok", "as the server's")
    found = f"{skew:.0f} s off the server's; late runs and leases are judged by the clock"
    return Check("clock", "warn", found, "synchronize the clocks (NTP)")


def _ray(settings: Settings) -> Check:
    state = stack.find(settings)
    address = os.environ.get("RAY_ADDRESS") or (state.ray_address if state else "")
    if not address:
        return Check("ray", "fail", "no cluster is known", "run: trinity-sync up")
    if not parts.accepts(address):
        todo = "start it there, or correct RAY_ADDRESS"
        return Check("ray", "fail", f"nothing answers at {address}", todo)
    return Check("ray", "ok", f"something listens at {address}")


# -------------------------------------------------------------------- shared memory


def _spool(spool: Path, clock: Callable[[], float]) -> Iterator[Check]:
    if not spool.exists():
        good = os.access(spool.parent, os.W_OK | os.X_OK)
        todo = "" if good else "set TRINITY_SYNC_SPOOL to a folder in memory that can be written"
        found = f"{spool} is not there yet; {'a save makes it' if good else 'it cannot be made'}"
        yield Check("spool", "ok" if good else "fail", found, todo)
        return
    mode = spool.lstat()
    wrong = ""
    if not stat.S_ISDIR(mode.st_mode) or mode.st_uid != os.getuid():
        wrong = f"{spool} is not a folder of this user"
    elif mode.st_mode & 0o077:
        wrong = f"{spool} is open to other users"
    if wrong:
        todo = f"run: chmod 700 {spool}; or set TRINITY_SYNC_SPOOL to a folder of your own"
        yield Check("spool", "fail", wrong, todo)
        return
    room = os.statvfs(spool)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    kind = mount_of(spool).kind
    yield Check(
        "spool",
        "ok" if kind in ("tmpfs", "ramfs") else "warn",
        f"{spool} on {kind}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free",
        "" if kind in ("tmpfs", "ramfs") else "set TRINITY_SYNC_SPOOL to a folder in memory",
    )
    yield from (_tickets(job, clock) for job in job_spools(spool))


def _tickets(job: JobSpool, clock: Callable[[], float]) -> Check:
    sealed, bad = job.tickets()
    name = f"images of {job.folder.name}"
    stale = [s.ticket for s in sealed if clock() - s.ticket.sealed_at > STALE_S]
    if bad:
        return Check(name, "fail", str(bad[0]), "remove that ticket")
    if stale:
        steps = sorted({ticket.step for ticket in stale})
        found = f"{len(stale)} of steps {steps} wait for more than {STALE_S / 60:.0f} minutes"
        return Check(name, "warn", found, "look at their flow runs, and whether a worker runs here")
    return Check(name, "ok", f"{len(sealed)} wait to be saved")


# -------------------------------------------------------------------- a job


def _root(root: Path, settings: Settings) -> Iterator[Check]:
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        found = f"{root} cannot be read and written by this user"
        yield Check("root", "fail", found, f"change its owner or mode: ls -ld {root}")
        return
    try:
        yield from _abilities(probe(root), settings)
    except RootError as error:
        yield Check("root", "fail", str(error), "see docs/roots.md")
        return
    if store := store_of(root):
        yield _store(root, store)
    latest = newest(root)
    yield _disk(root, latest.nbytes if latest else 0)
    yield _write_speed(root)
    if latest and settings.spool.is_dir():
        spool = JobSpool(settings.spool / job_id(root))
        yield _images(spool, settings, int(latest.nbytes * _share_of_ranks(root, settings)))
    yield _steps(root)
    for kind in KINDS:
        best, named = newest(root, kind), read_iteration(root, kind)
        step = best.step if best else None
        found = f"names {'nothing' if named is None else f'step {named}'}"
        if step != named:
            found += f", and the newest is {'none' if step is None else f'step {step}'}"
        todo = "" if step == named else f"run: trinity-sync reconcile {root}"
        state: Literal["ok", "warn"] = "ok" if step == named else "warn"
        yield Check(f"latest {kind}", state, found, todo)


def _disk(root: Path, step_bytes: int) -> Check:
    room = os.statvfs(root)
    free = room.f_bavail * room.f_frsize
    fit = f", {free // step_bytes} checkpoints like the newest" if step_bytes else ""
    state: Literal["ok", "warn", "fail"] = "ok"
    if step_bytes and free < 3 * step_bytes:
        state = "warn" if free >= step_bytes else "fail"
    todo = "" if state == "ok" else "remove old steps, or move the job to a larger disk"
    return Check("disk", state, f"{free / 1e9:.1f} GB free{fit}", todo)


def _abilities(found: Abilities, settings: Settings) -> Iterator[Check]:
    """What the root's file system can do, and what is done where it cannot."""
    mount = found.mount
    here = mount.keeps_locks_here
    yield Check(
        "file system",
        "warn" if here else "ok",
        f"{mount}, {'which other nodes may see' if mount.shared else 'of this node alone'}"
        + (f"; the option {here} keeps locks on this node" if here else ""),
        "mount it without that option before ranks are on several nodes" if here else "",
    )
    for each in found.each:
        state: Literal["ok", "fail"] = "fail" if each.why_not and each.needed else "ok"
        answer = f"no ({each.why_not}): {each.without}" if each.why_not else "yes"
        todo = "take another file system for the root, see docs/roots.md"
        yield Check(each.name, state, answer, todo if state == "fail" else "")
    used = recycles(found.root, settings.recycle) and found.has("leases")
    why = "" if used else " (TRINITY_SYNC_RECYCLE; a file system of this node alone, with leases)"
    yield Check("recycled files", "ok", ("yes" if used else "no") + why)


def _store(root: Path, url: str) -> Check:
    """Whether the store in which steps count can be reached, and has them."""
    from trinity_sync.storage.remote import Remote

    try:
        there = [step.step for step in Remote(url).steps() if step.state == "whole"]
    except TrinitySyncError as error:
        return Check("store", "fail", str(error), "mend that; saves fail until then")
    lacking = [each.step for each in committed_steps(root) if must_be_sent(root, each)]
    found = f"{len(there)} whole steps at {url}"
    if lacking:
        return Check("store", "warn", f"{found}; it lacks {lacking}", "the next save sends them")
    return Check("store", "ok", found)


def _write_speed(root: Path) -> Check:
    path = root / f".doctor.{uuid4().hex}{TEMPORARY_SUFFIX}"
    content = memoryview(mmap.mmap(-1, PROBE_BYTES))  # at a page boundary, as direct I/O wants it
    try:
        start = time.perf_counter()
        write_file(path, content)
        speed = PROBE_BYTES / (time.perf_counter() - start) / 1e9
    except OSError as error:
        found = f"a file of {PROBE_BYTES >> 20} MiB cannot be written: {error.strerror}"
        return Check("write speed", "fail", found, "make room, or mend the disk")
    finally:
        path.unlink(missing_ok=True)
    slow = speed < 0.1
    found = f"{speed:.2f} GB/s for {PROBE_BYTES >> 20} MiB"
    todo = "a faster disk, or fewer saves" if slow else ""
    return Check("write speed", "warn" if slow else "ok", found, todo)


def _share_of_ranks(root: Path, settings: Settings) -> float:
    """Which part of the ranks that saved last is on this node; all of them if nobody knows."""
    run = newest_run(root)
    if run is None:
        return 1.0
    found = [placement(root, run.number, run.key, role) or () for role in settings.roles]
    places = [place for of_role in found for place in of_role]
    here = sum(len(place.ranks) for place in places if place.node == settings.node)
    return here / sum(len(place.ranks) for place in places) if here else 1.0


def _images(spool: JobSpool, settings: Settings, step_bytes: int) -> Check:
    """Whether the slots of this node's ranks fit."""
    need = settings.slots * step_bytes
    room = os.statvfs(settings.spool)
    mine = sum(path.stat().st_blocks * 512 for path in spool.folder.glob("*.slot"))
    have = room.f_bavail * room.f_frsize + mine
    found = f"{settings.slots} x {step_bytes / 1e9:.1f} GB needed, {have / 1e9:.1f} GB to be had"
    if have >= need:
        return Check("room for images", "ok", found)
    todo = "enlarge /dev/shm (--shm-size of a container), or TRINITY_SYNC_SLOTS=1"
    return Check("room for images", "warn", found, todo)


def _steps(root: Path) -> Check:
    whole, wrong = 0, []
    for step in steps_on_disk(root):
        try:
            require_committed(root, step)
            whole += 1
        except TrinitySyncError:
            wrong.append(step)
    if wrong:
        todo = f"see: trinity-sync ls {root}"
        return Check("steps", "warn", f"{whole} whole; not committed or damaged: {wrong}", todo)
    return Check("steps", "ok", f"{whole} whole")
