"""Write the images of one component, of one step, on one node, under temporary names.

Nothing gets its final name here: that is the commit's. Writing the same images again, after a
crash or a retry, gives the same bytes.
"""

import errno
import io
import math
import os
import tarfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from trinity_sync.errors import FormatError, ImageError, MissingShardsError, SaveError, TicketError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.fs.direct_io import write_file
from trinity_sync.layout import Kind, step_folder
from trinity_sync.snapshot.callable_status import Receipt
from trinity_sync.snapshot.slot_lock import claimed, held, locked
from trinity_sync.snapshot.spool import JobSpool, Sealed
from trinity_sync.snapshot.ticket import Export, Ticket, failure_path, read_ticket
from trinity_sync.storage.block_reuse import remove_spares, take_spare
from trinity_sync.storage.manifest import FileRecord, Manifest, own_manifest
from trinity_sync.storage.placement import Share, named
from trinity_sync.storage.write_permits import ones_turn


@dataclass(frozen=True)
class Save:
    """Which save is meant, as files know it."""

    root: str
    run: int
    step: int
    kind: Kind
    roles: tuple[str, ...]
    run_key: str = ""

    @property
    def folder(self) -> Path:
        """The step's folder."""
        return step_folder(self.root, self.step)

    def owns(self, ticket: Ticket) -> bool:
        """Whether an image of this run and step was submitted with this very save."""
        return ticket.kind == self.kind and ticket.role in self.roles

    def __str__(self) -> str:
        return f"{self.kind} of step {self.step} (run {self.run}) in {self.root}"


@dataclass(frozen=True)
class Written:
    """A file that waits under a temporary name for the commit."""

    record: FileRecord
    temporary: str
    """Absolute path; empty for a file that an earlier commit of the step contains already."""
    identity: tuple[int, int]
    """Inode and time of the last write in ns: tells the file from another one of its name."""
    components: tuple[str, ...]
    """All that the rank hands over in this save."""
    seconds: float
    export: Export = ""
    node: str = ""
    """Where it was written."""
    sealed_s: float = 0.0
    """When its submission was sealed, by its node's monotonic clock; 0 for what came with another
    save of the step."""


class Part:
    """What one task has made of a save, for its commit.

    No dataclass: Prefect walks through those, value by value, wherever they are handed on.
    """

    def __init__(self, written: Sequence[Written], receipts: Sequence[Receipt] = ()) -> None:
        self.written = tuple(written)
        self.receipts = tuple(receipts)


@dataclass(frozen=True)
class WriteOptions:
    """How to write; see ``settings``."""

    direct: bool = True
    bytes_per_s: float = 0.0
    gather_s: float = 60.0
    writers: int = 4
    """Shards that one task writes at a time."""
    nice: int = 0
    """By how much the writing threads yield to others, as in nice(1)."""


def persist(
    share: Share,
    save: Save,
    component: str,
    options: WriteOptions,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Written]:
    """Wait for the images of ``component`` that a node holds, this one, and write them durably.

    Raises:
        MissingShardsError: a rank did not hand its image over within ``gather_s`` seconds.
        TicketError, ImageError: an image cannot be trusted.
        FormatError: another release has staged an image of the save, or committed the step.
        SaveError: it cannot be written; the cause is the OSError of the file system.
    """
    sealed, committed = _gather(share, save, component, options.gather_s, clock)
    attempt = uuid.uuid4().hex[:8]
    gently = partial(yield_to_others, options.nice)
    with ExitStack() as locks:
        # all of them first: an image that waits for its turn must not give way to a later save
        contents = [locks.enter_context(_held(save, image)) for image in sealed]
        for image in sealed:
            failure_path(image.slot).unlink(missing_ok=True)  # a retry has begun
        write = partial(_write, share, save, options, attempt)
        try:
            with ThreadPoolExecutor(options.writers, "persist", initializer=gently) as writers:
                written = list(writers.map(write, sealed, contents))
        except BaseException:
            # a full disk must not stay full because of us
            remove_files(save.folder.rglob(f".*.{attempt}.*{TEMPORARY_SUFFIX}"))
            raise
    return [*committed, *(file for files in written for file in files)]


def discard(written: Iterable[Written]) -> None:
    """Remove what waits under temporary names for a commit that does not come."""
    for file in written:
        if file.temporary:
            Path(file.temporary).unlink(missing_ok=True)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove temporary files as far as the file system lets us; what stays, ``reconcile`` finds."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def mark_failed(spool: JobSpool, save: Save, reason: str) -> None:
    """Note beside the images of a save that it failed, so that they give way first."""
    for sealed in spool.of_step(save.run, save.step)[0]:
        if save.owns(sealed.ticket):
            mark_image_failed(sealed, reason)


def mark_image_failed(sealed: Sealed, reason: str) -> None:
    """Note beside one image why it is not saved, unless its slot holds another one by now.

    Raises:
        LockTimeoutError: the trainer that fills the slot hangs.
    """
    with suppress(FileNotFoundError), claimed(sealed.slot), held(sealed.slot):
        now = read_ticket(sealed.slot)
        if now and now.image == sealed.ticket.image:
            failure_path(sealed.slot).write_text(reason)


def _gather(
    share: Share, save: Save, component: str, gather_s: float, clock: Callable[[], float]
) -> tuple[list[Sealed], list[Written]]:
    """The images to write, and the files that a commit of the same step has already."""
    spool = JobSpool(Path(share.spool))
    wanted = {
        role: [rank for rank in ranks if rank == 0 or component != "metadata"]
        for role, ranks in share.ranks.items()
    }
    deadline = clock() + gather_s
    later: set[tuple[str, int]] = set()
    while True:
        waiting, bad = spool.tickets()
        for error in bad:
            if isinstance(error, FormatError) and (error.run, error.step) == (save.run, save.step):
                raise error
        sealed = [i for i in waiting if (i.ticket.run, i.ticket.step) == (save.run, save.step)]
        manifest = own_manifest(save.root, save.run, save.step)
        known = manifest.images if manifest else frozenset()
        uncommitted = {
            image.ticket.image
            for image in sealed
            if save.owns(image.ticket) and image.ticket.component == component
        }.difference(known)
        if manifest and manifest.holds(save.kind, save.roles) and not uncommitted:  # a retry
            mine = [file for file in manifest.files if file.component == component]
            return [], [_as_written(f, ()) for f in mine if f.rank in wanted.get(f.role, ())]
        overdue = clock() >= deadline
        by_rank: dict[tuple[str, int], list[Sealed]] = defaultdict(list)
        for image in sealed:
            by_rank[image.ticket.role, image.ticket.rank].append(image)
        images: list[Sealed] = []
        committed: list[Written] = []
        missing: dict[str, list[int]] = defaultdict(list)
        awaited: set[tuple[str, int]] = set()
        for role, rank in [(role, rank) for role, ranks in wanted.items() for rank in ranks]:
            of_rank = by_rank[role, rank]
            own = [image.ticket for image in of_rank if image.ticket.kind == save.kind]
            if not own:
                missing[role].append(rank)
                continue
            if component not in own[0].components:
                continue
            done = _committed(manifest, role, component, rank)
            its = [image for image in of_rank if image.ticket.component == component]
            # of a step that was submitted twice the first images, or components would be mixed
            found = min(
                its,
                key=lambda i: (i.ticket.kind != save.kind, i.ticket.monotonic_s),
                default=None,
            )
            # another save of the step, the sync, writes its image itself: wait for its commit
            theirs = found and found.ticket.kind != save.kind and not found.failed
            if found and found.ticket.image in uncommitted:
                images.append(found)  # also if it is submitted again: the commit compares the two
            elif done:
                committed += [_as_written(record, own[0].components) for record in done]
            elif found and (not theirs or overdue):
                images.append(found)
            else:
                missing[role].append(rank)
                if found:
                    awaited.add((role, rank))
        if not missing:
            return images, committed
        _refuse_evicted(share, save, component, missing, later - awaited)
        # judged by the next look, which finds whatever is sealed by now unless it was evicted
        later = _past_it(save, [image.ticket for image in waiting])
        if overdue:
            for error in bad:
                if not isinstance(error, TicketError):
                    continue
                if error.component == component and error.rank in missing.get(error.role, ()):
                    raise error
            lacking = ", ".join(f"role {role} {named(ranks)}" for role, ranks in missing.items())
            raise MissingShardsError(
                f"{save} is not committed: {component} of {lacking} was not handed over on node "
                f"{share.node} within {gather_s:g} s. Did that process die, or did its "
                "image give way to a later step, as its log then says? What was handed over is in "
                f"{spool.folder}; the next save goes on without this one."
            )
        time.sleep(0.01)


def _past_it(save: Save, tickets: Sequence[Ticket]) -> set[tuple[str, int]]:
    """Roles and ranks that have sealed a later step since this one was begun on this node.

    Images of an earlier start of the same run are older than this save, and prove nothing.
    """
    run = [ticket for ticket in tickets if ticket.run == save.run]
    own = [t.sealed_at for t in run if (t.step, t.kind) == (save.step, save.kind)]
    begun = min(own, default=math.inf)
    return {(t.role, t.rank) for t in run if t.step > save.step and t.sealed_at > begun}


def _refuse_evicted(
    share: Share,
    save: Save,
    component: str,
    missing: Mapping[str, Sequence[int]],
    later: Collection[tuple[str, int]],
) -> None:
    """Do not wait for images that cannot come: a rank saves its steps in their order.

    Args:
        missing: ranks without an image to write, by role.
        later: see `_past_it`.

    Raises:
        MissingShardsError: a rank is among both.
    """
    evicted = {role: [r for r in ranks if (role, r) in later] for role, ranks in missing.items()}
    if any(evicted.values()):
        what = ", ".join(f"role {role} {named(ranks)}" for role, ranks in evicted.items() if ranks)
        raise MissingShardsError(
            f"{save} is not committed: {component} of {what} was evicted from {share.spool} on "
            f"node {share.node}, where later steps wait. The next save goes on without this one."
        )


def _committed(manifest: Manifest | None, role: str, component: str, rank: int) -> list[FileRecord]:
    if manifest is None:
        return []
    wanted = (role, component, rank)
    return [f for f in manifest.files if (f.role, f.component, f.rank) == wanted]


def _as_written(record: FileRecord, components: tuple[str, ...]) -> Written:
    return Written(record, "", (0, 0), components, 0.0)


@contextmanager
def _held(save: Save, sealed: Sealed) -> Iterator[memoryview]:
    """The image's bytes under its locks, seen to be the image that was found."""
    try:
        with claimed(sealed.slot), locked(sealed.slot) as content:
            _check(save, sealed, content)
            yield content[: sealed.ticket.nbytes]
    except FileNotFoundError as error:
        if sealed.slot.exists():
            raise _gave_way(save, sealed.ticket) from error
        what = sealed.ticket.what
        raise ImageError(f"{save}: the image of {what} is gone from the spool") from error


def _write(
    share: Share,
    save: Save,
    options: WriteOptions,
    attempt: str,
    sealed: Sealed,
    image: memoryview,
) -> list[Written]:
    ticket = sealed.ticket
    if not Path(save.root).is_dir():
        raise SaveError(f"{save}: the job's root {save.root} is gone; make it and retry")
    try:
        with ones_turn(JobSpool(Path(share.spool)), ticket):
            write = partial(_write_one, share.node, save, sealed, options, attempt)
            return [write(*file) for file in files_in(ticket, image)]
    except OSError as error:
        raise SaveError(
            f"{save} is not committed: cannot write {ticket.what} to "
            f"{error.filename or save.folder}: {error.strerror}. Mend that and retry the flow run; "
            "the image waits in the spool."
        ) from error


def _check(save: Save, sealed: Sealed, content: memoryview) -> None:
    """See, under its locks, that the image is still the one that was found."""
    ticket = sealed.ticket
    now = read_ticket(sealed.slot)
    if now is None or now.image != ticket.image:
        raise _gave_way(save, ticket)
    if len(content) < ticket.nbytes:
        raise ImageError(
            f"{save}: the image of {ticket.what} in {sealed.slot} is truncated: {len(content):,} "
            f"of {ticket.nbytes:,} bytes. It cannot be saved; later saves are not concerned."
        )


def _gave_way(save: Save, ticket: Ticket) -> ImageError:
    return ImageError(
        f"{save}: the image of {ticket.what} gave way to a later step and cannot be saved any "
        "more; cancel this flow run."
    )


def _write_one(
    node: str,
    save: Save,
    sealed: Sealed,
    options: WriteOptions,
    attempt: str,
    path: str,
    content: memoryview,
) -> Written:
    ticket = sealed.ticket
    final = save.folder / path
    if not final.resolve().is_relative_to(save.folder.resolve()):
        raise ImageError(f"{save}: the image of {ticket.what} wants to be written outside, {final}")
    make_folder(final.parent)
    temporary = temporary_name(final, attempt, ticket.image)
    start = time.perf_counter()
    take_spare(save.root, temporary, len(content))
    try:
        digest = write_file(
            temporary, content, direct=options.direct, bytes_per_s=options.bytes_per_s
        )
        sync_folder(final.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # a retry finds their room, and that of attempts that died
            remove_spares(save.root)
            remove_files(final.parent.glob(f".*.{ticket.image}{TEMPORARY_SUFFIX}"))
        if error.filename is None:
            error.filename = os.fspath(final)
        raise
    return Written(
        FileRecord(
            path=path,
            nbytes=len(content),
            digest=digest,
            role=ticket.role,
            component=ticket.component,
            rank=ticket.rank,
            world_size=ticket.world_size,
            images=(ticket.image,),
        ),
        temporary=os.fspath(temporary),
        identity=identity_of(temporary),
        components=ticket.components,
        seconds=time.perf_counter() - start,
        export=ticket.export,
        node=node,
        sealed_s=ticket.monotonic_s if ticket.kind == save.kind else 0.0,
    )


def yield_to_others(nice: int) -> None:
    """Lower the priority of this thread to ``nice``; it ends before the process.

    Linux keeps a priority for each thread, which POSIX would not. A thread that yields more already
    (Ray starts its workers at 15) stays so: raising a priority takes a privilege.
    """
    thread = threading.get_native_id()
    if nice > os.getpriority(os.PRIO_PROCESS, thread):
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def temporary_name(final: Path, attempt: str, image: str) -> Path:
    """Where an attempt to save an image writes ``final`` before the commit.

    Attempts have names of their own: two may be under way at a time, and each must find its own
    file in the end.
    """
    return final.with_name(f".{final.name}.{attempt}.{image}{TEMPORARY_SUFFIX}")


def image_of_temporary(name: str) -> str:
    """The image that is written under a name of `temporary_name`; empty for other files."""
    parts = name.removesuffix(TEMPORARY_SUFFIX).rsplit(".", 2)
    temporary = name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)
    return parts[2] if temporary and len(parts) == 3 else ""


def identity_of(path: Path) -> tuple[int, int]:
    """See `Written.identity`."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def files_in(ticket: Ticket, image: memoryview) -> Iterator[tuple[str, memoryview]]:
    """The files that an image becomes, by path below the step's folder.

    Raises:
        ImageError: it is a folder's, and cannot be unpacked.
    """
    if ticket.form == "file":
        yield ticket.path, image
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(image), mode="r:") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                content = tar.extractfile(entry) if entry.isfile() else None
                if content is None or name.is_absolute() or ".." in name.parts:
                    raise ImageError(f"the image of {ticket.what} holds {entry.name!r}: not a file")
                yield f"{ticket.path}/{entry.name}", memoryview(content.read())
    except tarfile.TarError as error:
        raise ImageError(f"the image of {ticket.what} is no folder of files: {error}") from error
