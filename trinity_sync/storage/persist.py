"""Write the images of one component, of one step, on one node, under temporary names.

The commit gives files their final names. Writing the same images again, after a crash or a retry,
gives the same bytes.

Write permits decide which shards may be written at the same time (``write_concurrency`` of the
job). A permit is a kernel lock on an empty file. It ends with the block or with the process, so a
failed save never blocks later ones, and no server is needed. Writers are not ordered: the kernel
decides which of them acquires a free permit.

::

    root/.trinity_sync/writing.lock       one: one shard of the job, on any node
    spool/writing.lock                    per_node: one shard on this node, of any job of a user
    spool/{job}/writing.rank{R}.lock      per_rank: one shard of each rank

The first needs a shared file system whose locks reach other nodes, as commits do.
"""

import logging
import math
import mmap
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import EvictedError, ImageError, SaveError
from trinity_sync.fs.atomic import (
    NO_ROOM,
    TEMPORARY_SUFFIX,
    is_temporary,
    link_or_copy,
    list_paths,
    make_folder,
    open_fd,
    pin_folder,
    sync_file,
    sync_folder,
    walk_files,
)
from trinity_sync.fs.direct_io import (
    RateLimit,
    digest_cached_file,
    digest_file,
    digest_parts,
    open_to_read,
    write_file,
)
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.process import lower_thread_priority
from trinity_sync.layout import PRIVATE_FOLDER, is_below, shard_file, step_folder
from trinity_sync.snapshot.identity import SaveId, require_root
from trinity_sync.snapshot.packed import unpack
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import Ticket, failure_path, hold_image, lock_slot
from trinity_sync.storage.block_reuse import WORTHWHILE, acquire_spare, remove_spares
from trinity_sync.storage.discovery import list_commits_before
from trinity_sync.storage.manifest import (
    COMPARED,
    DISTCP,
    FileHealth,
    FileRecord,
    read_run_manifest,
    sum_up_health,
)
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.uncommitted import Written, gather_images, remove_files

if TYPE_CHECKING:
    from trinity_sync.tensors.health import ValueScan

logger = logging.getLogger(__name__)

WRITERS = 4
"""Shards that one task writes at a time."""
SAMPLES = 16
SAMPLED = 4096
"""Bytes at about as many places of a file that are compared before all of it is."""


@dataclass(frozen=True)
class WriteOptions:
    """Options of the writes, as in the settings."""

    limit: RateLimit | None = None
    """Speed limit of the node."""
    rank_timeout_s: float = 60.0
    nice: int = 0
    """Niceness of the writing threads, as in nice(1)."""
    refuse_nonfinite: bool = False
    """Whether to refuse weights and optimizers with values that are not finite."""


def persist(
    shards: NodeShards,
    save: SaveId,
    component: str,
    options: WriteOptions,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Written]:
    """Wait for the images of a component on this node, and write them durably.

    Return the written files, and those that an earlier commit of the step contains already.

    Raises:
        MissingShardsError: a rank did not submit its image within ``options.rank_timeout_s``.
        EvictedError: an image was evicted for a later step.
        TicketError, ImageError: an image cannot be trusted.
        FormatError: the job's spool is of another release, or another one has committed the step.
        SaveError: a file cannot be written; the cause is the OSError of the file system. Or values
            that are not finite are refused, or the save was committed and removed before.
    """
    sealed, committed = gather_images(shards, save, component, options.rank_timeout_s, clock)
    initializer = partial(lower_thread_priority, options.nice)
    with ExitStack() as locks:
        # lock all of them first: an image that waits for its write must not be evicted
        try:
            contents = [locks.enter_context(_lock_content(save, image)) for image in sealed]
        except (EvictedError, ImageError):
            manifest = read_run_manifest(save.root, save.run, save.step)
            if not manifest or not {each.ticket.image for each in sealed} <= manifest.images:
                raise
            # another attempt has committed them meanwhile, and freed their slots
            locks.close()
            return persist(shards, save, component, options, clock=clock)
        for image in sealed:
            failure_path(image.slot).unlink(missing_ok=True)  # this is a retry
        ranks = {each.ticket.rank for each in sealed if each.ticket.nbytes >= WORTHWHILE}
        earlier = _map_earlier_files(save, ranks) if ranks else {}
        attempt = _Attempt(shards, save, options, earlier)
        try:
            with ThreadPoolExecutor(WRITERS, "persist", initializer=initializer) as writers:
                written = list(writers.map(attempt.write, sealed, contents))
        except BaseException:
            # a failed attempt must not keep a disk full
            remove_files(walk_files(save.folder, f".*.{attempt.name}.*{TEMPORARY_SUFFIX}"))
            raise
    return [*committed, *(file for files in written for file in files)]


@contextmanager
def _lock_content(save: SaveId, sealed: SealedImage) -> Iterator[memoryview]:
    """Yield the bytes of an image under its locks, after a check that they are all there still."""
    ticket = sealed.ticket
    try:
        with hold_image(sealed.slot, ticket.image), lock_slot(sealed.slot) as content:
            if len(content) < ticket.nbytes:
                raise ImageError(
                    f"{save}: the image of {ticket.what} in {sealed.slot} is truncated: "
                    f"{len(content):,} of {ticket.nbytes:,} bytes. It cannot be saved; later saves "
                    "are unaffected."
                )
            yield content[: ticket.nbytes]
    except FileNotFoundError as error:
        if sealed.slot.exists():
            raise EvictedError(
                f"{save}: the image of {ticket.what} was evicted for a later step and can no "
                "longer be saved. Do not retry it."
            ) from None  # an I/O error would be repeated
        raise ImageError(f"{save}: the image of {ticket.what} is missing in the spool") from error


@dataclass(frozen=True)
class _Attempt:
    """An attempt to write images, whose files have names of its own."""

    shards: NodeShards
    save: SaveId
    options: WriteOptions
    earlier: Mapping[str, tuple[Path, FileRecord]]
    """Files of the newest commit before it, by their path below the step's folder."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def write(self, sealed: SealedImage, image: memoryview) -> list[Written]:
        """Write the files of an image, and return them; raises as `require_root`."""
        save, ticket = self.save, sealed.ticket
        require_root(save.root, save.job)
        try:
            with acquire_write_permit(JobSpool(Path(self.shards.spool)), ticket):
                written = [self._write_one(ticket, *file) for file in unpack_image(ticket, image)]
                return [*written, *self._link_replicas(ticket, written)]
        except OSError as error:
            raise SaveError(
                f"{save} is not committed: cannot write {ticket.what} to "
                f"{error.filename or save.folder}: {error.strerror}. Repair that; the image "
                f"stays in the spool: trinity-sync retry {save.root} {save.step}",
                path=Path(error.filename or save.folder),
                rank=ticket.rank,
            ) from error

    def _write_one(self, ticket: Ticket, path: str, content: memoryview | Path) -> Written:
        save, own = self.save, ticket.kind == self.save.kind
        final = save.folder / path
        if not is_below(path):
            raise ImageError(
                f"{save}: the image of {ticket.what} names {final}, outside of the step"
            )
        make_folder(final.parent)
        start = time.perf_counter()
        with pin_folder(final.parent) as folder:  # another user may make it a link meanwhile
            temporary = make_attempt_path(folder / final.name, self.name, ticket.image)
            try:
                same = _link_unchanged(content, self.earlier.get(path), temporary)
                digest, health = same or self._write_content(ticket, content, temporary)
            except OSError as error:
                if error.errno in NO_ROOM:
                    # make room for a retry, also what attempts that died have taken
                    remove_spares(save.root)
                    remove_files(walk_files(folder, f".*.{ticket.image}{TEMPORARY_SUFFIX}"))
                if error.filename is None:
                    error.filename = os.fspath(final)
                raise
            nbytes, identity = temporary.lstat().st_size, read_file_identity(temporary)
        record = FileRecord(
            path=path,
            nbytes=nbytes,
            digest=digest,
            role=ticket.role,
            component=ticket.component,
            rank=ticket.rank,
            world_size=ticket.count_ranks(ticket.component),
            images=(ticket.image,),
            health=health,
        )
        if self.options.refuse_nonfinite:
            _refuse_nonfinite(save, record)
        return Written(
            record,
            temporary=os.fspath(final.with_name(temporary.name)),
            identity=identity,
            components=ticket.components,
            replicated=ticket.replicated,
            seconds=time.perf_counter() - start,
            attached=str(content) if isinstance(content, Path) else "",
            export=ticket.export,
            keep=ticket.keep if own else 0,
            metrics=ticket.metrics,
            node=self.shards.node,
            sealed_s=ticket.monotonic_s if own else 0.0,
            submitted_at=ticket.sealed_at if own else 0.0,
            stall_s=ticket.stall_s if own else 0.0,
        )

    def _write_content(
        self, ticket: Ticket, content: memoryview | Path, temporary: Path
    ) -> tuple[str, FileHealth | None]:
        """Give a file its content, durably; return its digest, and what is known of its values."""
        if isinstance(content, Path):
            _name_attached(content, temporary)
            return digest_cached_file(temporary), None
        acquire_spare(self.save.root, temporary, len(content))
        scan = _scan(ticket, content)
        parts = scan.walk(content) if scan else ()
        how: dict[str, Any] = {"limit": self.options.limit, "parts": parts}
        if isinstance(content.obj, mmap.mmap) and ticket.form == "file":
            # at its end, the mapping of 1 GiB would hold up the commit for 28 ms
            how["on_written"] = partial(content.obj.madvise, mmap.MADV_DONTNEED)
        digest = write_file(temporary, content, **how)
        sync_folder(temporary.parent)
        return digest, FileHealth(*scan.sum_up()) if scan else None

    def _link_replicas(self, ticket: Ticket, written: Sequence[Written]) -> Iterator[Written]:
        """Give the shard of several ranks the names of the others, where veRL's loader looks.

        The others' submissions are those of their own images.
        """
        for file in written:
            for rank in ticket.replicas.get(ticket.component, ()):
                if rank != ticket.rank:
                    name = shard_file(ticket.component, ticket.world_size, rank)
                    final = self.save.folder / ticket.role / name
                    temporary = make_attempt_path(final, self.name, ticket.image)
                    link_or_copy(Path(file.temporary), temporary)
                    yield replace(
                        file,
                        record=replace(file.record, path=f"{ticket.role}/{name}", rank=rank),
                        temporary=os.fspath(temporary),
                        identity=read_file_identity(temporary),
                        components=(),
                        sealed_s=0.0,
                        submitted_at=0.0,
                    )
            sync_folder(Path(file.temporary).parent)


def _refuse_nonfinite(save: SaveId, record: FileRecord) -> None:
    if record.health and record.health.nonfinite:
        raise SaveError(
            f"{save} is not committed: {sum_up_health([record])[0].wrong}. Resume from a "
            "healthy step (latest_step(healthy=True)). To save it nevertheless, set on_nonfinite "
            f"(trinity-sync jobs set {save.root} on_nonfinite=warn) and retry it "
            f"(trinity-sync retry {save.root} {save.step}).",
            path=save.folder / record.path,
            rank=record.rank,
        )


def _map_earlier_files(save: SaveId, ranks: Collection[int]) -> dict[str, tuple[Path, FileRecord]]:
    """Map the files of ranks in the newest checkpoint before one; no function writes into either.

    A sync's files may be opened by functions of the user, which know their names.
    """
    before = list_commits_before(save, ranks) if save.kind == "checkpoint" else []
    newest = next((each for each in before if each.serves("checkpoint")), None)
    if newest is None:
        return {}
    folder = step_folder(save.root, newest.step)
    return {record.path: (folder / record.path, record) for record in newest.files}


def _link_unchanged(
    content: memoryview | Path, earlier: tuple[Path, FileRecord] | None, temporary: Path
) -> tuple[str, FileHealth | None] | None:
    """Give the committed file with these bytes a temporary name, too; return as `_write_content`.

    None if there is none. The file is read again: one that is corrupted gets no other name.
    """
    if earlier is None or isinstance(content, Path) or len(content) < WORTHWHILE:
        return None
    (path, record), nbytes = earlier, len(content)
    # it is removed meanwhile, cannot be read, or can have no other name
    with suppress(OSError), pin_folder(path.parent) as folder:
        path = folder / path.name
        found = path.lstat()
        own = found.st_uid == os.geteuid() and not found.st_mode & 0o022  # as of a spare
        if not own or not found.st_size == record.nbytes == nbytes:
            return None
        with open_to_read(path, direct=False) as fd:  # most files have changed
            for at in range(0, nbytes, max(nbytes // SAMPLES, SAMPLED)):
                if os.pread(fd, SAMPLED, at) != content[at : at + SAMPLED]:
                    return None
        if digest_parts((content,)) != record.digest:
            return None
        os.link(path, temporary, follow_symlinks=False)
        # other nodes see by the time of its change that the save goes on
        touch = partial(temporary.chmod, stat.S_IMODE(found.st_mode))
        if digest_file(temporary, nbytes, lambda _: touch()) == record.digest:
            sync_folder(temporary.parent)
            return record.digest, record.health
    temporary.unlink(missing_ok=True)
    return None


def _name_attached(content: Path, temporary: Path) -> None:
    """Give a file of other code a temporary name, or a copy of it if others may write into it.

    One that cannot be synced is removed: the kernel would report no error to the next attempt.
    """
    with open_fd(content, os.O_RDONLY | os.O_NONBLOCK) as fd:
        try:
            os.fsync(fd)
        except OSError:
            content.unlink()
            raise
    links = content.stat().st_nlink
    if links > 1:  # of which other attempts may have made some
        others = list_paths(temporary.parent, f".*{TEMPORARY_SUFFIX}")
        links -= sum(map(content.samefile, others))
    if content.resolve() == content and links == 1:
        link_or_copy(content, temporary)
    else:
        shutil.copy2(content, temporary)
    sync_file(temporary)


def _scan(ticket: Ticket, content: memoryview) -> "ValueScan | None":
    """Return what looks at the values of an image; None for one that is not looked into."""
    if ticket.component not in COMPARED or not ticket.path.endswith((".pt", DISTCP)):
        return None
    from trinity_sync.tensors.health import ValueScan  # imports NumPy, for those who write

    try:
        return ValueScan(content, of_items=ticket.path.endswith(DISTCP))
    except Exception as error:  # of any state that can be pickled; it is saved all the same
        logger.warning("cannot look at the values of %s: %r", ticket.what, error)
        return None


def make_attempt_path(final: Path, attempt: str, image: str) -> Path:
    """Return the path that an attempt to save an image writes to before the commit.

    Each attempt, which has a random name, has paths of its own, because two may be in flight at a
    time.
    """
    return final.with_name(f".{final.name}.{attempt}.{image}{TEMPORARY_SUFFIX}")


def parse_image_name(name: str) -> str:
    """Return the image in the name of a `make_attempt_path`; empty for other file names."""
    return name.removesuffix(TEMPORARY_SUFFIX).rpartition(".")[2] if is_temporary(name) else ""


def read_file_identity(path: Path) -> tuple[int, int]:
    """Return the `Written.identity` of a file."""
    found = path.lstat()
    return found.st_ino, found.st_mtime_ns


def digest_content(content: memoryview | Path) -> str:
    """Return the digest of a file of `unpack_image`; empty if other code has removed it."""
    if isinstance(content, Path):
        return digest_cached_file(content.resolve()) if content.exists() else ""
    return digest_parts((content,))


def unpack_image(ticket: Ticket, image: memoryview) -> Iterator[tuple[str, memoryview | Path]]:
    """Yield the files that an image becomes: path below the step's folder, and content.

    The content of a file in `attaching_folder` is its path.

    Raises:
        ImageError: it is the image of a folder and cannot be unpacked.
    """
    if ticket.form == "file":
        yield ticket.path, image
        return
    for name, content in unpack(image, ticket.what):
        yield name if isinstance(content, Path) else f"{ticket.path}/{name}", content


def acquire_write_permit(spool: JobSpool, ticket: Ticket) -> AbstractContextManager[object]:
    """Hold the write permit of an image within the block; wait for it without a limit."""
    path = write_permit_path(spool, ticket)
    return acquire_file_lock(path, limit_s=math.inf) if path else nullcontext()


def write_permit_path(spool: JobSpool, ticket: Ticket) -> Path | None:
    """Return the path of the lock file of an image's write permit; None if it needs no permit."""
    name = "writing.lock"
    match ticket.write_concurrency:
        case "one":
            return Path(ticket.root) / PRIVATE_FOLDER / name
        case "per_node":
            return spool.folder.parent / name
        case "per_rank":
            return spool.folder / f"writing.rank{ticket.rank}.lock"
        case _:
            return None
