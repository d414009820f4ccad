"""Write the images of one component, of one step, on one node, under temporary names.

Nothing gets its final name here: that is the commit's. Writing the same images again, after a
crash or a retry, gives the same bytes.
"""

import errno
import io
import os
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from trinity_sync.errors import ImageError, SaveError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.fs.direct_io import write_file
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.slot_lock import lock_image, lock_slot
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import Ticket, failure_path, read_ticket
from trinity_sync.storage.block_reuse import remove_spares, take_spare
from trinity_sync.storage.gather import gather_images
from trinity_sync.storage.manifest import FileRecord
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Written, remove_files
from trinity_sync.storage.write_permits import acquire_write_permit


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
    share: NodeShards,
    save: SaveId,
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
    sealed, committed = gather_images(share, save, component, options.gather_s, clock)
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


@contextmanager
def _held(save: SaveId, sealed: SealedImage) -> Iterator[memoryview]:
    """The image's bytes under its locks, seen to be the image that was found."""
    try:
        with lock_image(sealed.slot), lock_slot(sealed.slot) as content:
            _check(save, sealed, content)
            yield content[: sealed.ticket.nbytes]
    except FileNotFoundError as error:
        if sealed.slot.exists():
            raise _gave_way(save, sealed.ticket) from error
        what = sealed.ticket.what
        raise ImageError(f"{save}: the image of {what} is gone from the spool") from error


def _write(
    share: NodeShards,
    save: SaveId,
    options: WriteOptions,
    attempt: str,
    sealed: SealedImage,
    image: memoryview,
) -> list[Written]:
    ticket = sealed.ticket
    if not Path(save.root).is_dir():
        raise SaveError(f"{save}: the job's root {save.root} is gone; make it and retry")
    try:
        with acquire_write_permit(JobSpool(Path(share.spool)), ticket):
            write = partial(_write_one, share.node, save, sealed, options, attempt)
            return [write(*file) for file in files_in(ticket, image)]
    except OSError as error:
        raise SaveError(
            f"{save} is not committed: cannot write {ticket.what} to "
            f"{error.filename or save.folder}: {error.strerror}. Mend that and retry the flow run; "
            "the image waits in the spool."
        ) from error


def _check(save: SaveId, sealed: SealedImage, content: memoryview) -> None:
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


def _gave_way(save: SaveId, ticket: Ticket) -> ImageError:
    return ImageError(
        f"{save}: the image of {ticket.what} gave way to a later step and cannot be saved any "
        "more; cancel this flow run."
    )


def _write_one(
    node: str,
    save: SaveId,
    sealed: SealedImage,
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
