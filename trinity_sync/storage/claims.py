"""Who still needs a step: leases of readers, pins and tags of people, and the lock of removal.

::

    root/.trinity_sync/
      claims.lock                       shared to take or renew a lease or pin, exclusive to remove
      leases/40.{random}.json           a reader's claim on step 40 for so many seconds
      pins/40.json                      step 40 is kept until it is unpinned
      pins/best.json                    a tag: a pin with a name, which says its step inside

A claim is a file, so it needs no server, and holds for every node that sees the root. A lease is
taken under the shared lock and only of a step that is committed; steps are removed under the
exclusive lock and only when nobody claims them. So a reader has its step or an error, never a
folder that vanishes under its hands. A reader that died without giving its lease back blocks a
step until the lease ends; not at all where its process is known to be gone. A tag moves to another
step by one rename of its file, so it names a step at every instant. What another release has
claimed holds its step, and is not removed or replaced here.
"""

import logging
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_sync.errors import CommitError, ConfigError, FormatError
from trinity_sync.fs.atomic import (
    make_folder,
    names_anew,
    read_anew,
    replace_file,
    sync_folder,
)
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.locks import Held, file_lock, file_lock_if_free
from trinity_sync.fs.process import process_home, process_lives, process_name
from trinity_sync.fs.records import is_seconds, make_record
from trinity_sync.fs.root_records import from_text, to_text
from trinity_sync.layout import PRIVATE_FOLDER, check_name, parse_number
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""Seconds that a lease lasts unless it is renewed."""
LONG_LEASE_S = 86_400.0
"""The same for who reads whole steps; a lease ends earlier with its process."""

_ENDLESS_S = 1e11
"""Seconds in 3,000 years: of a lease that another release has taken."""

CLAIM_S = 30.0
"""Seconds in which a lease or pin has been taken, also on a slow file server."""


@dataclass(frozen=True)
class Lease:
    """A reader's claim on a step."""

    step: int
    holder: str
    """Who reads, for people."""
    host: str
    """As `process_home` names it."""
    process: str
    """``pid/start time`` there."""
    ttl_s: float
    path: Path
    """The file; its time of change is when the lease was taken or renewed."""

    def renew(self) -> None:
        """Let the lease begin anew; also a late one, as long as its step is there.

        Raises:
            CommitError: it had ended, and it was removed, or its step was.
        """
        root = self.path.parents[2]
        try:
            with file_lock(_lock_of(root), shared=True):  # nobody judges leases meanwhile
                if file_time(root) > self.path.stat().st_mtime + self.ttl_s:
                    require_committed(root, self.step)
                os.utime(self.path)
        except FileNotFoundError:
            raise CommitError(
                f"the lease of {self.holder} on step {self.step} had ended ({self.path} is gone); "
                "take a new one, of the newest step"
            ) from None

    def release(self) -> None:
        """Give the step up; again is harmless."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process == process_name(os.getpid()):  # else a child that was forked in the block
            self.release()


@dataclass(frozen=True)
class Pin:
    """A step that is kept until it is unpinned; with a name, until the tag is moved or removed."""

    step: int
    reason: str
    pinned_at: float
    """Seconds since the epoch."""
    name: str = ""
    """The tag; empty for a pin without a name."""

    @property
    def kind(self) -> str:
        """``pin`` or ``tag``."""
        return "tag" if self.name else "pin"

    @property
    def why(self) -> str:
        """Its name and its reason, as far as it has them."""
        return ": ".join(filter(None, (self.name, self.reason)))


def take_lease(root: str | Path, step: int, holder: str, *, ttl_s: float = LEASE_S) -> Lease:
    """Claim a committed step for ``ttl_s`` seconds; a context manager that gives it back.

    Raises:
        CommitError: the step is not committed, or damaged.
        ConfigError: ``ttl_s`` is no number of seconds.
    """
    if not is_seconds(ttl_s):
        raise ConfigError(
            f"step {step} of {root}: a lease of {ttl_s!r} s for {holder} cannot be taken; pass a "
            "number of seconds, or pin the step to keep it without end"
        )
    with _committed(root, step):
        path = _folder(root, "leases") / f"{step}.{uuid.uuid4().hex}.json"
        lease = Lease(step, holder, process_home(), process_name(os.getpid()), ttl_s, path)
        body = asdict(lease)
        del body["path"]
        replace_file(path, to_text(body))
        return lease


@contextmanager
def to_be_read(root: str | Path, step: int, holder: str) -> Iterator[Manifest]:
    """The manifest of a committed step that is claimed in the block, for a day at most.

    A root that may only be read, another job's maybe, takes no lease; that is logged.

    Raises:
        CommitError: the step is not committed, or damaged.
    """
    with ExitStack() as claim:
        try:
            claim.enter_context(take_lease(root, step, holder, ttl_s=LONG_LEASE_S))
        except OSError as error:
            logger.warning(
                "step %d in %s cannot be claimed (%s): see that nobody removes it while it is read",
                step,
                root,
                error.strerror,
            )
        yield require_committed(root, step)


def leases(root: str | Path, *, clock: Callable[[], float] | None = None) -> list[Lease]:
    """The leases that hold; those that ended, or whose process is gone, are removed.

    A lease whose file is torn holds the step of its file's name, for `LONG_LEASE_S`; one of another
    release holds it until that release removes it. What has ended
    is looked at again under the lock under which leases are renewed, before it is removed; within
    `nobody_claims` it stays, for the next call.

    Args:
        root: the job's root.
        clock: seconds since the epoch; that of the root's file system unless it is given.
    """
    names = names_anew(Path(root) / PRIVATE_FOLDER / "leases", "[0-9]*.json")
    paths = [path for path in names if _step_of_lease(path) is not None]  # the others are not ours
    now = clock() if clock else file_time(root) if paths else 0.0
    found = {path: lease for path in paths if (lease := _holding(path, now))}
    ended = [path for path in paths if path not in found and path.exists()]
    if ended:
        # where nothing may be written, or somebody holds the lock, they are removed later
        with suppress(OSError), file_lock_if_free(_lock_of(root)) as alone:
            for path in ended if alone else []:
                if lease := _holding(path, now):
                    found[path] = lease
                else:
                    path.unlink(missing_ok=True)
    return [found[path] for path in sorted(found)]


def pin(
    root: str | Path, step: int, reason: str = "", *, clock: Callable[[], float] = time.time
) -> Pin:
    """Keep a committed step until it is unpinned.

    Raises:
        CommitError: the step is not committed, or damaged.
        FormatError: another release has pinned it.
    """
    with _committed(root, step):
        _require_own_release(_pin_file(root, step))
        made = Pin(step, reason, clock())
        _write_pin(_pin_file(root, step), made)
        return made


def tag(
    root: str | Path,
    step: int,
    name: str,
    reason: str = "",
    *,
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> Pin:
    """Give a committed step a name, one of any number; the step is kept as if it were pinned.

    Args:
        root: the job's root.
        step: a committed one.
        name: letters, digits, ``_`` and ``-``, and not digits alone.
        reason: why, for people.
        force: take the name from another step that has it.
        clock: seconds since the epoch.

    Raises:
        ConfigError: the name cannot be one, or is that of another step.
        CommitError: the step is not committed, or damaged.
        FormatError: another release has given the name, and ``force`` is not set.
    """
    if check_name("tag", name).isdecimal():
        raise ConfigError(f"tag {name!r} would look like the number of a step; add a letter to it")
    with _committed(root, step, shared=False):  # nobody else takes the name meanwhile
        path = _pin_file(root, name)
        if not force:
            _require_own_release(path)
        before = None if force else _read_pin(path)
        if before and before.step != step:
            raise ConfigError(
                f"tag {name} is at step {before.step} in {root}; to move it to step {step}: "
                f"trinity-sync tag {root} {step} {name} --force"
            )
        made = Pin(step, reason, clock(), name)
        _write_pin(path, made)
        return made


def unpin(root: str | Path, which: int | str) -> bool:
    """Remove the pin of a step, or the tag of a name, durably; whether there was one.

    Raises:
        ConfigError: no tag can have such a name.
    """
    path = _pin_file(root, check_name("tag", str(which)))
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_folder(path.parent)
    return True


def pins(root: str | Path) -> list[Pin]:
    """The pins, tags among them, by step and name; a pin whose file is torn still holds.

    Raises:
        CommitError: the file of a tag is torn, so that any step could be the one that it holds.
    """
    paths = names_anew(_pin_file(root, "").parent, "[!.]*.json")
    found = [each for path in paths if (each := _read_pin(path))]
    return sorted(found, key=lambda each: (each.step, each.name))


def tags(root: str | Path) -> dict[str, Pin]:
    """The tags by name; raises what `pins` does."""
    return {each.name: each for each in pins(root) if each.name}


def step_of(root: str | Path, text: str) -> int:
    """The step that a person names, by its number or by a tag; it need not be committed.

    Raises:
        ConfigError: it is neither.
        CommitError: the file of a tag is torn.
    """
    if (step := parse_number(text)) is not None:
        return step
    with suppress(ConfigError):  # no tag has such a name
        if found := _read_pin(_pin_file(root, check_name("tag", text))):
            return found.step
    raise ConfigError(
        f"{text!r} is neither the number of a step nor a tag in {root} "
        f"(tags: {', '.join(sorted(tags(root))) or 'none'}); trinity-sync ls {root} shows both"
    )


def claimed(root: str | Path) -> dict[int, list[str]]:
    """The steps that are pinned or leased, each with who holds it, in words."""
    found: dict[int, list[str]] = defaultdict(list)
    for each in pins(root):
        words = (
            f"tagged {each.why}" if each.name else f"pinned: {each.why}" if each.why else "pinned"
        )
        found[each.step].append(words)
    for lease in leases(root):
        found[lease.step].append(f"leased by {lease.holder}")
    return found


@contextmanager
def nobody_claims(root: str | Path) -> Iterator[Held]:
    """No lease or pin comes into being within such a block: for whoever removes steps.

    Look at `leases` and `pins` inside, and take a step's name away before the block ends.

    Raises:
        LockTimeoutError: others have the lock for longer than a lease or pin takes; no commit is to
            wait for them meanwhile.
    """
    with file_lock(_lock_of(root), limit_s=CLAIM_S) as lock:
        yield lock


def _holding(path: Path, now: float) -> Lease | None:
    """The lease of a file, if it is one and holds."""
    if (step := _step_of_lease(path)) is None:
        return None
    try:
        with path.open("rb") as file:  # first: another node may have renewed it just now
            renewed_at = os.fstat(file.fileno()).st_mtime
            content = file.read()
    except FileNotFoundError:
        return None  # given back meanwhile
    lease = Lease(step, "unknown (its file is torn)", "", "", LONG_LEASE_S, path)
    with suppress(ValueError):
        try:
            written = make_record(Lease, from_text(content, path), path=path)
        except FormatError as error:
            return Lease(step, f"a reader of another release: {error}", "", "", _ENDLESS_S, path)
        lease = written if written.step == step else lease
    gone = lease.host == process_home() and not process_lives(lease.process)
    return None if gone or now > renewed_at + lease.ttl_s else lease


def _step_of_lease(path: Path) -> int | None:
    return parse_number(path.name.partition(".")[0])


def _pin_file(root: str | Path, which: int | str) -> Path:
    return Path(root) / PRIVATE_FOLDER / "pins" / f"{which}.json"


def _write_pin(path: Path, pin: Pin) -> None:
    body = asdict(pin)
    del body["name"]  # its file has it
    make_folder(path.parent)
    replace_file(path, to_text(body))


def _read_pin(path: Path) -> Pin | None:
    """The pin of a file, or None if there is no such file (any more)."""
    step = parse_number(path.stem)
    name = path.stem if step is None else ""
    try:
        found = make_record(Pin, from_text(read_anew(path), path), name=name)
        if step in (None, found.step):
            return found
        raise ValueError("it is that of another step")
    except FileNotFoundError:
        return None
    except FormatError as error:
        of = error.step if step is None else step
        if of is None:
            raise
        return Pin(of, f"by another release: {error}", path.stat().st_mtime, name)
    except ValueError as error:
        if step is not None:
            return Pin(step, "unknown (its file is torn)", path.stat().st_mtime)
        root = path.parents[2]
        raise CommitError(
            f"{path} is torn, so nobody can tell which step it keeps. Tag the step again: "
            f"trinity-sync tag {root} STEP {name} --force; or: trinity-sync untag {root} {name}"
        ) from error


def _require_own_release(path: Path) -> None:
    """See that the pin of a file, if there is one, is not that of another release.

    Raises:
        FormatError: it is.
    """
    with suppress(FileNotFoundError, ValueError):
        from_text(read_anew(path), path)


@contextmanager
def _committed(root: str | Path, step: int, *, shared: bool = True) -> Iterator[None]:
    """Nobody removes the step within such a block, and it is committed at its beginning."""
    if not _lock_of(root).exists():  # nor is a root made that is not mounted here
        require_committed(root, step)
    with file_lock(_lock_of(root), shared=shared):
        require_committed(root, step)
        yield


def _lock_of(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "claims.lock"


def _folder(root: str | Path, name: str) -> Path:
    folder = Path(root) / PRIVATE_FOLDER / name
    make_folder(folder)
    return folder
