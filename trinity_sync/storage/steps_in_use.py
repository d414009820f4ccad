"""What keeps a step: leases of readers, pins and tags; and the removal lock.

::

    root/.trinity_sync/
      removal.lock                      shared to acquire a lease or pin, exclusive to remove steps
      leases/40.{random}.json           a reader's lease of step 40 for some seconds
      pins/40.json                      step 40 is kept until it is unpinned
      pins/best.json                    a tag: a named pin, whose file contains the step

A lease is a file, so it needs no server, and works for every node that sees the root. It is
acquired under the shared lock, and only for a committed step; steps are removed under the exclusive
lock, and only when they are not in use (`list_steps_in_use`). So a reader gets its step or an
error, never a folder that vanishes while it is read. The lease of a reader that died blocks its
step until the lease ends, or until this node sees that the process is gone.

A pin is acquired as a lease is, and stays until a user removes it. A tag moves to another step by
one rename of its file, so it names a step at every instant.
"""

import logging
import math
import os
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trinity_sync.errors import CommitError, ConfigError, ManifestError, warn_once
from trinity_sync.fs.atomic import (
    UNWRITABLE,
    list_uncached,
    make_folder,
    read_uncached,
    remove_file,
    replace_file,
    sync_folder,
)
from trinity_sync.fs.file_system import read_file_system_time
from trinity_sync.fs.locks import LockFile, acquire_file_lock
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace
from trinity_sync.fs.records import (
    Count,
    Record,
    Seconds,
    decode_record,
    encode_record,
    read_record,
)
from trinity_sync.layout import PRIVATE_FOLDER, check_name, check_number, parse_number
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.discovery import (
    is_valid,
    iter_newest_first,
    list_newest_first,
    require_committed,
    require_run,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics

logger = logging.getLogger(__name__)

LEASE_S = 86_400.0
"""Seconds that a lease lasts, for reading a whole step; it ends earlier with its process."""

ACQUIRE_S = 30.0
"""Seconds within which a lease or pin is acquired, even on a slow file server."""


@dataclass(frozen=True)
class _LeaseRecord(Record):
    """Content of the file of a lease."""

    step: Count
    holder: str
    """Name of the reader, for messages."""
    host: str
    """As `read_process_namespace` names it."""
    process: str
    """``pid/start time`` there."""
    ttl_s: Seconds


@dataclass(frozen=True)
class Lease(_LeaseRecord):
    """A lease of a reader on a step."""

    path: Path
    """Path of the file; its mtime is when the lease was acquired."""


def warn_unwritable(root: Path, why: str | None) -> None:
    """Log, once a process, that a root, a real path, can be read and not written."""
    warn_once(
        f"{root} cannot be written by this process ({why}): its steps are read without a lease, so "
        "do not remove them meanwhile, and none can be saved"
    )


@contextmanager
def lease_to_read(
    root: str | Path,
    step: int,
    holder: str,
    *,
    ttl_s: float = LEASE_S,
    paths: Collection[str] | None = None,
) -> Iterator[Manifest]:
    """Lease a committed step within the block, for ``ttl_s`` at most, and yield its manifest.

    The step is checked once, under the lock under which it is leased. If it cannot be leased, for
    example on a full disk or in a root that cannot be written, a warning says so. Messages name the
    ``holder``; ``paths`` are as in `require_committed`.

    Raises:
        CommitError: the step is not committed, or corrupted.
        FormatError: another release has made the root or committed the step.
    """
    path = Path(root) / PRIVATE_FOLDER / "leases" / f"{step}.{uuid.uuid4().hex}.json"
    process = read_process_identity(os.getpid())
    lease = _LeaseRecord(step, holder, read_process_namespace(), process, ttl_s)
    with ExitStack() as leased:
        try:
            with _prevent_removal(root, step, paths=paths) as manifest:
                make_folder(path.parent)
                replace_file(path, encode_record(lease))
                leased.callback(_release, path, os.getpid())
        except OSError as error:
            if error.errno in UNWRITABLE:
                warn_unwritable(Path(root).resolve(), error.strerror)
            else:
                logger.warning(
                    "cannot lease step %d in %s (%s): do not remove it while it is read",
                    step,
                    root,
                    error.strerror,
                )
            manifest = require_committed(root, step, paths=paths)
        yield manifest


def _release(path: Path, pid: int) -> None:
    if pid != os.getpid():
        return  # a child that was forked in the block
    try:
        remove_file(path)
    except OSError as error:  # what was read is good, and on all ranks; the lease ends anyway
        logger.warning("cannot remove %s, which ends by itself: %s", path, error)


def list_leases(root: str | Path, *, clock: Callable[[], float] | None = None) -> list[Lease]:
    """Return the valid leases; remove those that ended or whose process is gone.

    A lease whose file is torn keeps the step in its file name for `LEASE_S`. The time is that of
    the root's file system, unless ``clock`` returns it.
    """
    names = list_uncached(Path(root) / PRIVATE_FOLDER / "leases", "[0-9]*.json")
    numbers = ((path, parse_number(path.name.partition(".")[0])) for path in names)
    steps = {path: step for path, step in numbers if step is not None}
    now = clock() if clock else read_file_system_time(root) if steps else 0.0
    found = []
    for path, step in sorted(steps.items()):
        if lease := _read_valid_lease(path, step, now):
            found.append(lease)
        else:
            with suppress(OSError):  # in a root that cannot be written it stays
                remove_file(path)
    return found


def acquire_removal_lock(root: str | Path) -> AbstractContextManager[LockFile]:
    """Hold the removal lock within the block, so that no lease or pin is acquired.

    Call `list_leases` and `list_pins` inside, and rename the removed steps before the block ends.

    Raises:
        LockTimeoutError: other processes hold the lock for longer than a lease or pin takes.
            Commits must not wait for them.
    """
    return acquire_file_lock(_removal_lock_path(root), limit_s=ACQUIRE_S)


@contextmanager
def _prevent_removal(
    root: str | Path, step: int, *, shared: bool = True, paths: Collection[str] | None = None
) -> Iterator[Manifest]:
    """Prevent the removal of a step within the block, and yield its manifest.

    The step is committed when the block begins. If ``shared``, other leases and pins can be
    acquired meanwhile. ``paths`` are as in `require_committed`; raises as `lease_to_read`.
    """
    read_identity(root)  # which refuses a root of another release
    if not _removal_lock_path(root).exists():  # do not create a root that is not mounted here
        require_committed(root, step, paths=())
    with acquire_file_lock(_removal_lock_path(root), shared=shared):
        yield require_committed(root, step, paths=paths)


def _removal_lock_path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "removal.lock"


def _read_valid_lease(path: Path, step: int, now: float) -> Lease | None:
    """Return the lease of a step in a file; None if it has ended."""
    found = read_record(_LeaseRecord, path)
    try:
        acquired_at = path.lstat().st_mtime
    except FileNotFoundError:
        return None  # released meanwhile
    lease = Lease(step, "unknown (its file is torn)", "", "", LEASE_S, path)
    if found:
        lease = Lease(**vars(found), path=path)
    gone = lease.host == read_process_namespace() and not is_process_alive(lease.process)
    return None if gone or now > acquired_at + lease.ttl_s else lease


_LATEST = re.compile(r"(latest|healthy)(?:~(\d{1,9}))?")
"""What names the newest checkpoint, or with ``~1`` the one before it; no tag has such a name."""
_BEST = re.compile(r"best=(?:\d+:)?([^:=,]+):(min|max)")
"""What names the best checkpoint by a metric, also as a word of a retention policy."""
BEST = "best model of the training"
"""Reason of the pin of a trainer's best step, which it removes once another step is better."""


@dataclass(frozen=True)
class _PinRecord(Record):
    """Content of the file of a pin or tag."""

    step: Count
    reason: str
    pinned_at: Seconds
    """Seconds since the epoch."""
    run: Count = 0
    """Run whose step a tag names; 0 for a pin."""
    run_key: str = ""


@dataclass(frozen=True)
class Pin(_PinRecord):
    """A step that is kept until it is unpinned; a tag, until the tag is moved or removed."""

    name: str = ""
    """The tag; empty for a pin without a name."""

    @property
    def kind(self) -> str:
        """``pin`` or ``tag``."""
        return "tag" if self.name else "pin"

    @property
    def why(self) -> str:
        """Name and reason of the pin, as far as it has them."""
        return ": ".join(filter(None, (self.name, self.reason)))


def pin(root: str | Path, step: int, reason: str = "") -> Pin:
    """Keep a committed step until it is unpinned.

    Raises:
        CommitError: the step is not committed, or corrupted.
    """
    with _prevent_removal(root, step):
        return _write_pin(_pin_file(root, step), _PinRecord(step, reason, time.time()))


def pin_ahead(root: str | Path, step: int, reason: str) -> None:
    """Keep a step from its commit on; call it before the save is submitted.

    Nothing can remove the step between its commit and the pin, as it could before `pin`. A step
    that is pinned already keeps its pin.
    """
    if not _pin_file(root, step).exists():
        _write_pin(_pin_file(root, step), _PinRecord(step, reason, time.time()))


def tag(root: str | Path, step: int, name: str, reason: str = "", *, force: bool = False) -> Pin:
    """Give a committed step a name, which keeps the step as a pin does.

    The name has letters, digits, ``_`` and ``-``, and not digits alone. ``force`` moves the tag
    from another step.

    Raises:
        ConfigError: the name is not valid, or is the tag of another step.
        CommitError: the step is not committed, or corrupted.
    """
    if check_name("tag", name).isdecimal():
        raise ConfigError(f"tag {name!r} looks like a step number; add a letter to it")
    if name in ("latest", "healthy"):
        raise ConfigError(f"{name} always names the newest such checkpoint; choose another tag")
    with _prevent_removal(root, step, shared=False) as now:  # no other process adds it
        path = _pin_file(root, name)
        before = None if force else _read_pin(path)
        if before and before.step != step:
            raise ConfigError(
                f"tag {name} is at step {before.step} in {root}; to move it to step {step}: "
                f"trinity-sync pin {root} {step} --name {name} --force"
            )
        record = _PinRecord(step, reason, time.time(), now.run, now.run_key)
        return _write_pin(path, record, name)


def unpin(root: str | Path, which: int | str) -> bool:
    """Remove the pin of a step number, or a tag by its name, durably; return whether there was one.

    Raises:
        ConfigError: the name of the tag is not valid.
    """
    path = _pin_file(root, check_name("tag", str(which)))
    if not path.exists():
        return False
    remove_file(path)
    sync_folder(path.parent)
    return True


def list_pins(root: str | Path, *, skip_torn: bool = False) -> list[Pin]:
    """Return the pins and tags by step and name; a pin whose file is torn still counts.

    ``skip_torn`` leaves out the tags whose step is unknown.

    Raises:
        CommitError: the file of a tag is torn, so its step is unknown.
    """
    found = []
    for path in list_uncached(_pin_file(root, "").parent, "[!.]*.json"):
        try:
            each = _read_pin(path)
        except CommitError:
            if not skip_torn:
                raise
            continue
        found += [each] if each else []
    return sorted(found, key=lambda each: (each.step, each.name))


def is_pinned(root: str | Path, step: int) -> bool:
    """Return whether a step is pinned or tagged; a tag whose file is torn may name any step."""
    try:
        return any(each.step == step for each in list_pins(root))
    except CommitError:
        return True


def list_tags(root: str | Path, *, skip_torn: bool = False) -> dict[str, Pin]:
    """Return the tags by name; ``skip_torn``, and what is raised, as in `list_pins`."""
    return {each.name: each for each in list_pins(root, skip_torn=skip_torn) if each.name}


def list_best(root: str | Path) -> list[int]:
    """Return the steps that a trainer has pinned as its best, committed or not."""
    pins = list_pins(root, skip_torn=True)
    return [each.step for each in pins if each.reason == BEST and not each.name]


def find_pinned_best(root: str | Path) -> int | None:
    """Return the newest valid step that a trainer has pinned as its best."""
    return max((each for each in list_best(root) if is_valid(root, each)), default=None)


def resolve_step(root: str | Path, step: int | str) -> int:
    """Return the step that a user names; one named by its number need not be committed.

    A text is a number, a tag, ``latest`` for the newest checkpoint that is valid, ``latest~1`` for
    the one before it, ``healthy`` for the newest one without NaN or infinite values, or
    ``best=val_loss:min`` for the best one by a metric. ``best`` without such a tag is what a
    trainer has pinned as its best, or the best one by the metric of the job's ``keep``.

    Raises:
        ConfigError: it is none of these.
        CommitError: the file of a tag is torn, its step replaced, or there are too few checkpoints.
        FormatError: another release has committed a newer step.
    """
    if step is None:
        raise ConfigError(f"step None: latest_step() has found none in {root}; pass an int")
    if not isinstance(step, str):
        return check_number("step", step)
    if (number := parse_number(step)) is not None:
        return number
    if latest := _LATEST.fullmatch(step):
        return _find_latest(root, int(latest[2] or 0), healthy=latest[1] == "healthy")
    with suppress(ConfigError):  # no tag has such a name
        if found := _read_pin(_pin_file(root, check_name("tag", step))):
            return _find_tagged(root, found)
    rule = _BEST.fullmatch(step)
    if step == "best":
        if (best := find_pinned_best(root)) is not None:
            return best
        job = read_job_settings(root)
        rule = _BEST.search(f"{job.keep},{job.keep_model}")
    if rule:
        return _find_best(root, *rule.groups())
    raise ConfigError(
        f"{step!r} is neither the number of a step, nor latest, healthy or best=METRIC:max, nor a "
        f"tag in {root} (tags: {', '.join(sorted(list_tags(root))) or 'none'}); trinity-sync ls "
        f"{root} shows the steps and tags"
    )


def _find_tagged(root: str | Path, tag: Pin) -> int:
    with suppress(ManifestError):  # which reading the step reports
        now = read_manifest(root, tag.step, ranks=())
        if tag.run and now:
            move = f"trinity-sync pin {root} {tag.step} --name {tag.name} --force"
            require_run(root, now, tag, f"To move tag {tag.name} to what is there now: {move}")
    return tag.step


def _find_best(root: str | Path, metric: str, mode: str) -> int:
    """Return the best valid checkpoint by a metric, of equal ones the oldest; weights suffice."""
    sign = -1 if mode == "max" else 1
    steps = reversed(list_newest_first(root, "checkpoint", reduced=True))
    found = {each.step: read_metrics(root, each.run, each.step) for each in steps}
    rated = {step: sign * each[metric] for step, each in found.items() if metric in each}
    finite = [step for step, value in rated.items() if math.isfinite(value)]
    for step in sorted(finite, key=rated.__getitem__):
        try:
            return require_committed(root, step).step
        except CommitError as error:
            logger.warning("%s", error)
    known = ", ".join(sorted({name for each in found.values() for name in each}))
    raise CommitError(
        f"no valid checkpoint in {root} has a finite metric {metric!r} (known: {known or 'none'}); "
        f"record it: trinity-sync metrics {root} STEP {metric}=VALUE"
    )


def _find_latest(root: str | Path, before: int, *, healthy: bool) -> int:
    """Return the newest valid checkpoint, or the one as many checkpoints before it."""
    valid = [*islice(iter_newest_first(root, "checkpoint", healthy=healthy), before + 1)]
    if len(valid) > before:
        return valid[before].step
    what, count = "healthy" if healthy else "valid", len(valid)
    have = f"has {count} {what} checkpoints" if count else f"has no {what} checkpoint"
    raise CommitError(f"{root} {have}; trinity-sync ls {root} lists its steps")


def list_steps_in_use(root: str | Path) -> dict[int, list[str]]:
    """Return the steps that are pinned or leased, each with its holders, in words."""
    found: dict[int, list[str]] = defaultdict(list)
    for each in list_pins(root):
        words = (
            f"tagged {each.why}" if each.name else f"pinned: {each.why}" if each.why else "pinned"
        )
        found[each.step].append(words)
    for lease in list_leases(root):
        found[lease.step].append(f"leased by {lease.holder}")
    return found


def _pin_file(root: str | Path, which: int | str) -> Path:
    return Path(root) / PRIVATE_FOLDER / "pins" / f"{which}.json"


def _write_pin(path: Path, pin: _PinRecord, name: str = "") -> Pin:
    make_folder(path.parent)
    replace_file(path, encode_record(pin))
    return Pin(**vars(pin), name=name)


def _read_pin(path: Path) -> Pin | None:
    step = parse_number(path.stem)
    name = path.stem if step is None else ""
    try:
        found = decode_record(_PinRecord, read_uncached(path), path)
        if step in (None, found.step):
            return Pin(**vars(found), name=name)
        raise ValueError("it is the pin of another step")
    except FileNotFoundError:
        return None
    except ValueError as error:
        if step is not None:
            return Pin(step, "unknown (its file is torn)", path.lstat().st_mtime)
        root = path.parents[2]
        raise CommitError(
            f"{path} is torn, so the step of the tag is unknown. Pin the step again: "
            f"trinity-sync pin {root} STEP --name {name} --force; or: trinity-sync unpin {root} "
            f"{name}"
        ) from error
