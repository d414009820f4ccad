"""The commit: check that all is there, give every file its name, write the manifest, point at it.

The order is the promise. Before the manifest's rename a step is not committed, whatever else is in
its folder; after it, every file that it names is whole, named and durable. Each part may be done
again after a crash, and one lock a root keeps commits from crossing each other.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trinity_sync.errors import (
    FormatError,
    LockTimeoutError,
    ManifestError,
    MissingShardsError,
    SaveError,
    SupersededError,
)
from trinity_sync.fs.atomic import (
    REMOVED_PREFIX,
    TEMPORARY_SUFFIX,
    exchange,
    link_or_copy,
    make_folder,
    sync_folder,
)
from trinity_sync.fs.direct_io import digest_of, digest_of_bytes
from trinity_sync.fs.locks import LockFile, one_change_at_a_time
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FOLDERS,
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    SERVES_AS,
    Kind,
    is_below,
    job_id,
    step_folder,
)
from trinity_sync.snapshot.callable_status import Receipt, forget_receipts, receipts_of
from trinity_sync.snapshot.slot_lock import locked, release
from trinity_sync.snapshot.spool import JobSpool, Sealed
from trinity_sync.snapshot.ticket import read_ticket
from trinity_sync.storage.corruption import remove_mark
from trinity_sync.storage.discovery import manifest_state, newest
from trinity_sync.storage.export_requests import pass_on_wishes
from trinity_sync.storage.latest_pointer import advance_iteration, settle_iteration
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    ReceiptRecord,
    own_manifest,
    read_manifest,
    write_manifest,
    write_manifest_into,
)
from trinity_sync.storage.metrics import pass_on_metrics
from trinity_sync.storage.persist import (
    Save,
    Written,
    discard,
    files_in,
    image_of_temporary,
    mark_image_failed,
    remove_files,
)
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.placement import named
from trinity_sync.storage.quarantine import let_go_of_replaced, replacing_folder
from trinity_sync.storage.runs import refuse_abandoned

logger = logging.getLogger(__name__)


def await_receipts(
    spool: JobSpool,
    save: Save,
    *,
    at_least: int = 0,
    gather_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> list[Receipt]:
    """Wait until the save's functions have ended, and for ``at_least`` of them to have begun.

    Raises:
        SaveError: one of them failed, or its process died.
        MissingShardsError: fewer than ``at_least`` began within ``gather_s`` seconds.
    """
    deadline = clock() + gather_s
    while True:
        receipts = list(receipts_of(spool, save.run, save.step, save.kind))
        for receipt in receipts:
            if receipt.state == "failed":
                raise SaveError(
                    f"{save} is not committed: the save function {receipt.name!r} of rank "
                    f"{receipt.rank} failed: {receipt.error}"
                )
        if len(receipts) >= at_least and all(r.state == "finished" for r in receipts):
            return receipts
        if len(receipts) < at_least and clock() >= deadline:
            raise MissingShardsError(
                f"{save} is not committed: {at_least} saves by functions were registered and "
                f"{len(receipts)} begun within {gather_s:g} s"
            )
        time.sleep(0.02)


def commit(
    save: Save,
    written: Sequence[Written],
    receipts: Sequence[Receipt] = (),
    *,
    recycle: bool = True,
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Make the step official; doing it again is harmless.

    No commit makes the newest step of a kind an older one. A sync that would take the place of the
    newest checkpoint takes it over if the weights are the same, byte for byte, and is refused if
    not.

    Args:
        save: which one.
        written: its files.
        receipts: of its functions.
        recycle: keep the files of a step that is replaced for the next saves to write over.
        clock: source of the manifest's time.

    Raises:
        MissingShardsError: ranks or components are missing, or shards of two world sizes are mixed.
        SupersededError: a later run of the job has left this save behind.
        SaveError: a file has vanished or changed since it was written; this run has committed
            other content of the step; or the newest step of a kind would be lost.
        FormatError: another release has committed the step, or has begun a run of the job.
        CommitError: this node was cut off, and another one may have the lock of the root.
    """
    with one_change_at_a_time(save.root) as lock:
        refuse_abandoned(save.root, save.run, save.run_key, save.step)
        earlier = _earlier(save)
        roles = {file.record.role for file in written}
        if not (earlier and earlier.run == save.run and earlier.holds(save.kind, roles)):
            _check_complete(save, written, receipts)  # else it is retried, and all is there
        ours = earlier.files if earlier and earlier.run == save.run else ()
        committed = {record.path: record for record in ours}
        _refuse_other_content(save, written, committed)
        named = {file.record.path for file in written} | committed.keys()
        files = (*(file.record for file in written), *_files_of(save, receipts, named))
        manifest = Manifest(
            job=job_id(save.root),
            run=save.run,
            step=save.step,
            kinds=serves_as(save.kind, files, receipts),
            files=files,
            receipts=tuple(ReceiptRecord(r.name, r.rank, r.seconds, r.files) for r in receipts),
            committed_at=clock(),
        )
        lock.require_ours()
        make_folder(save.folder)
        if earlier and earlier.run > save.run:
            raise SupersededError(
                f"{save} is abandoned: run {earlier.run} has committed its own step {save.step}"
            )
        replaced = earlier if earlier and earlier.run < save.run else None
        if replaced and not _takes_over(save, replaced, manifest):
            _refuse_loss(save, replaced, manifest)
            _replace_step(save, written, manifest, replaced, lock, recycle=recycle)
        else:
            if not earlier:
                remove_mark(save.folder)  # of a step whose manifest is gone
            for file in written:
                final = f"{save.folder}/{file.record.path}"
                _name(file, final, committed.get(file.record.path))
            _sync_folders(save.folder, [file.path for file in manifest.files])
            if replaced:
                _pass_on(save, replaced)
            lock.require_ours()
            write_manifest_into(save.folder, earlier.joined(manifest) if earlier else manifest)
        lock.require_ours()
        announce(save.root, manifest)
        if replaced:
            for kind in {*replaced.kinds} - {*manifest.kinds}:  # a sync in a checkpoint's place
                settle_iteration(save.root, kind)
        _remove_other_attempts(save, written)
    return manifest


def finish_interrupted(save: Save) -> None:
    """Do what follows the manifest, for a commit whose process may have died right after it.

    Nothing is done if the step is not committed, or if a later run has left it behind. Waits while
    a commit is under way in the root.
    """
    if not read_manifest(save.root, save.step):
        return
    with one_change_at_a_time(save.root) as lock:
        manifest = read_manifest(save.root, save.step)
        if manifest is None or manifest.run != save.run:
            return
        try:
            refuse_abandoned(save.root, save.run, save.run_key, save.step)
        except SupersededError as error:
            logger.info("%s", error)
        else:
            lock.require_ours()
            announce(save.root, manifest)


def announce(root: str | Path, manifest: Manifest) -> None:
    """Mark a committed step, and point at it; under the commit lock."""
    folder = step_folder(root, manifest.step)
    if "checkpoint" in manifest.kinds:
        (folder / FULL_CHECKPOINT_MARK).touch()
    sync_folder(folder)
    for kind in manifest.kinds:
        advance_iteration(root, kind, manifest.run, manifest.step)


def release_slots(spool: JobSpool, save: Save, written: Sequence[Written]) -> None:
    """Free this node's slots of a committed save for the next ones.

    Until one of them fills a slot, `load_shards` finds the committed file there.
    """
    digests = {image: file.record.digest for file in written for image in file.record.images}
    for sealed in spool.of_step(save.run, save.step)[0]:
        if sealed.ticket.kind not in SERVES_AS[save.kind]:
            continue  # the checkpoint's, which may be sealed in the image of its sync
        if sealed.ticket.image in digests:
            release(sealed.slot, sealed.ticket.image, digests[sealed.ticket.image])
        elif save.owns(sealed.ticket):
            settle_late_image(save, sealed)
    forget_receipts(spool, save.run, save.step, save.kind)


def settle_late_image(save: Save, sealed: Sealed) -> None:
    """Free an image whose save is committed, or say that it is not part of it.

    One that holds what is committed, byte for byte, joins the manifest: a state that was submitted
    again. No other is freed; it is marked as failed, and so the first to be evicted.

    Raises:
        CommitError: this node was cut off, and another one may have the lock of the root.
        OSError: the root cannot be read or written.
    """
    if sealed.failed:
        return
    ticket = sealed.ticket
    try:
        with locked(sealed.slot) as content:
            now = read_ticket(sealed.slot)
            if now is None or now.image != ticket.image:
                return
            files = files_in(ticket, content[: ticket.nbytes])
            digests = {path: digest_of_bytes(each) for path, each in files}
    except FileNotFoundError:
        return
    with one_change_at_a_time(save.root) as lock:
        manifest = own_manifest(save.root, save.run, save.step)
        records = [manifest.file(path) if manifest else None for path in digests]
        same = [r for r in records if r and r.digest == digests[r.path]]
        if manifest and len(same) == len(digests):
            joined = [replace(r, images=(*r.images, ticket.image)) for r in same]
            lock.require_ours()
            write_manifest(save.root, manifest.joined(replace(manifest, files=tuple(joined))))
            release(sealed.slot, ticket.image, digests.get(ticket.path, ""))
            return
    there = "with another content" if manifest else "and has been removed or replaced since"
    reason = (
        f"{ticket.what} is not saved: the {save.kind} of that step was committed in {save.root} "
        f"without it, {there}. Submit all of a step in one call, and a state that has changed as "
        "another step"
    )
    mark_image_failed(sealed, reason)
    logger.error("%s", reason)


def _check_complete(save: Save, written: Sequence[Written], receipts: Sequence[Receipt]) -> None:
    problems = [] if written or receipts else ["nothing was handed over"]
    for role in save.roles:
        files = [file for file in written if file.record.role == role]
        shards = [file for file in files if file.record.component not in FOLDERS]
        sizes = {file.record.world_size for file in shards}
        if len(sizes) > 1:
            problems.append(f"role {role} mixes shards of world sizes {sorted(sizes)}")
        have: dict[str, set[int]] = defaultdict(set)
        submissions: dict[int, set[float]] = defaultdict(set)
        for file in files:
            have[file.record.component].add(file.record.rank)
            submissions[file.record.rank] |= {file.sealed_s} - {0.0}
        if mixed := [rank for rank, found in submissions.items() if len(found) > 1]:
            problems.append(f"role {role} mixes what {named(mixed)} submitted at two times")
        for component in {name for file in files for name in file.components}:
            ranks: Iterable[int] = range(max(sizes, default=1))
            if component == "metadata":
                ranks = range(1)
            elif component == "attachments":  # a rank has some or none
                ranks = sorted({f.record.rank for f in files if component in f.components})
            absent = [rank for rank in ranks if rank not in have[component]]
            if absent:
                problems.append(f"role {role} lacks {component} of {named(absent)}")
    if problems:
        raise MissingShardsError(
            f"{save} is not committed: {'; '.join(problems)}. Did a rank die before it handed its "
            "part over? The next save goes on without this one."
        )


def serves_as(
    kind: Kind, files: Iterable[FileRecord], receipts: Sequence[Receipt]
) -> tuple[Kind, ...]:
    """What a save is good for: a checkpoint serves as a sync if it holds weights.

    Of a user's functions nobody can tell what they wrote, so theirs serves as both.
    """
    weights = receipts or any(record.component == "model" for record in files)
    return SERVES_AS[kind] if weights else (kind,)


def _refuse_other_content(
    save: Save, written: Sequence[Written], committed: Mapping[str, FileRecord]
) -> None:
    """See that nothing is submitted again with another content.

    Raises:
        SaveError: this run has committed the file with other bytes.
    """
    for file in written:
        known = committed.get(file.record.path)
        if known and known.digest != file.record.digest:
            raise SaveError(
                f"{save} is not committed: run {save.run} has committed {known.path} of that step "
                "with another content, which stays. Save a state that has changed as another step"
            )


def _takes_over(save: Save, earlier: Manifest, manifest: Manifest) -> bool:
    """Whether a sync adds nothing to an earlier run's checkpoint of the step: then that stays.

    So it is where a run begins with a sync of the step that it has loaded.
    """
    if {*earlier.kinds} <= {*manifest.kinds}:
        return False
    held = {record.path: record.digest for record in earlier.files}
    return manifest_state(save.root, earlier, runs=()).state == "valid" and all(
        held.get(record.path) == record.digest for record in manifest.files
    )


def _pass_on(save: Save, earlier: Manifest) -> None:
    """Keep what belongs to a checkpoint that is taken over: its metrics, and exports to come."""
    pass_on_wishes(save.root, save.step, earlier.run, save.run)
    try:
        pass_on_metrics(save.root, save.step, earlier.run, save.run)
    except (FormatError, LockTimeoutError) as error:
        logger.warning("the metrics of step %d do not count for %s: %s", save.step, save, error)


def _refuse_loss(save: Save, earlier: Manifest, manifest: Manifest) -> None:
    """See that a step may be replaced by one that serves as fewer kinds.

    Raises:
        SaveError: it is the newest of a kind that the save does not serve as, or it is pinned or
            tagged.
    """
    lost = sorted({*earlier.kinds} - {*manifest.kinds})
    if lost and any(pin.step == save.step for pin in list_pins(save.root)):
        raise SaveError(
            f"{save} is not committed: it would replace the {lost[0]} of run {earlier.run}, which "
            f"is pinned or tagged. Save a checkpoint of step {save.step}, or remove the pin: "
            f"trinity-sync unpin {save.root} {save.step}"
        )
    for kind in lost:
        best = newest(save.root, kind)
        if best and best.step == save.step:
            raise SaveError(
                f"{save} is not committed: it would replace the newest {kind}, of run "
                f"{earlier.run}, with other weights, and nothing newer could be resumed from. Save "
                f"a checkpoint of step {save.step} or another step first, or go back on purpose: "
                f"trinity-sync rewind {save.root} --to STEP"
            )


def _remove_other_attempts(save: Save, written: Sequence[Written]) -> None:
    """Remove what other attempts to save the same images have written, or died at."""
    images = {image for file in written for image in file.record.images}
    for folder in {(save.folder / file.record.path).parent for file in written}:
        names = (entry.name for entry in os.scandir(folder))
        remove_files(folder / name for name in names if image_of_temporary(name) in images)


def _earlier(save: Save) -> Manifest | None:
    try:
        return read_manifest(save.root, save.step)
    except ManifestError as error:
        logger.warning("%s replaces what is not a commit: %s", save, error)
        return None


def make_durable(save: Save, receipts: Sequence[Receipt]) -> None:
    """Sync the files that save functions wrote on this node, whose page cache may have them."""
    for name in {name for receipt in receipts for name in receipt.files}:
        with suppress(FileNotFoundError), (save.folder / name).open("rb") as file:
            os.fsync(file.fileno())  # one that has vanished is named by the commit


def _files_of(save: Save, receipts: Sequence[Receipt], named: set[str]) -> Iterator[FileRecord]:
    """The files that save functions wrote.

    Not those ``named`` already: a function's list has all that changed while it ran, and so the
    shards of a sync that was committed meanwhile, too.
    """
    for name in sorted({name for receipt in receipts for name in receipt.files} - named):
        path = save.folder / name
        if not is_below(name) or not path.resolve().is_relative_to(save.folder.resolve()):
            raise SaveError(f"{save}: {path}, of a save function, is outside of the step's folder")
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            digest = digest_of(path)
            nbytes = path.stat().st_size
        except FileNotFoundError as error:
            raise SaveError(
                f"{save}: {path}, of a save function, is not in the root as the node of the commit "
                "sees it. Did something remove it, or is the root another disk on the node where "
                "the function ran?"
            ) from error
        yield FileRecord(path=name, nbytes=nbytes, digest=digest, role=Path(name).parts[0])


def _name(file: Written, final: str, committed: FileRecord | None) -> None:
    """Give a written file its final name, unless an earlier attempt did.

    What this run has committed, the sync of the step say, stays as it is and is never written over.
    """
    if file.temporary and committed:
        discard([file])
    elif file.temporary:
        with suppress(FileNotFoundError):  # an earlier attempt named it
            os.replace(file.temporary, final)  # noqa: PTH105 (paths would double the time)
    try:
        found = os.stat(final)  # noqa: PTH116
        same = found.st_size == (committed or file.record).nbytes
        if file.temporary and not committed:
            same = same and (found.st_ino, found.st_mtime_ns) == file.identity
    except FileNotFoundError as error:
        raise _vanished(file, final) from error
    if not same:
        raise SaveError(f"{final} was changed before its commit; retry the flow run")


def _vanished(file: Written, final: str) -> SaveError:
    where = f"which node {file.node} wrote, " if file.node else ""
    return SaveError(
        f"{final}, {where}is not in the root as the node of the commit sees it. If the root is a "
        "disk of each node's own, take one that all nodes see; else something removed the file: "
        "retry the flow run."
    )


def _replace_step(
    save: Save,
    written: Sequence[Written],
    manifest: Manifest,
    earlier: Manifest,
    lock: LockFile,
    *,
    recycle: bool,
) -> None:
    """Take the place of an earlier run's commit of the same step, in one exchange of folders.

    Files that the earlier commit does not name (a dataloader's, say) move along.
    """
    fresh = step_folder(replacing_folder(save.root), save.step)
    if fresh.exists() or fresh.is_symlink():  # an earlier attempt died
        let_go_of_replaced(save.root, save.step)
    make_folder(fresh)
    links = {file.record.path: Path(file.temporary) for file in written if file.temporary}
    # a step that is somebody's link gives way with the link, and what it leads to stays
    elsewhere = [path.resolve() for path in links.values()] if save.folder.is_symlink() else []
    official = {record.path for record in earlier.files} | {
        MANIFEST,
        FULL_CHECKPOINT_MARK,
        CORRUPTION_MARK,
    }
    official -= {name for receipt in manifest.receipts for name in receipt.files}
    for path in save.folder.rglob("*"):
        name = path.relative_to(save.folder).as_posix()
        passing = path.suffix == TEMPORARY_SUFFIX or path.name.startswith(REMOVED_PREFIX)
        if path.is_file() and name not in official and not passing:
            links.setdefault(name, path)
    for name, path in links.items():
        make_folder((fresh / name).parent)
        try:
            link_or_copy(path, fresh / name)
        except FileNotFoundError as error:
            missing = next((f for f in written if f.record.path == name), None)
            if missing is None:
                raise
            raise _vanished(missing, f"{save.folder}/{name}") from error
    _sync_folders(fresh, links)
    write_manifest_into(fresh, manifest)
    lock.require_ours()
    take_place(fresh, save.folder)
    sync_folder(Path(save.root))
    for path in elsewhere:
        path.unlink(missing_ok=True)
    keep = manifest.nbytes if recycle else 0
    if aside := let_go_of_replaced(save.root, save.step, keep=keep):
        logger.warning(
            "%s replaces that of run %d, which is kept in %s, since run %d had begun at step 0",
            save,
            earlier.run,
            aside,
            save.run,
        )


def take_place(fresh: Path, current: Path) -> None:
    """Swap two folders; where the file system cannot, there is a moment without ``current``."""
    if exchange(fresh, current):
        return
    aside = fresh.with_name(f"{fresh.name}.aside")
    current.rename(aside)
    fresh.rename(current)
    aside.rename(fresh)


def _sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Make files below the folder findable after a power cut, whoever made the folders above."""
    below = {name.rpartition("/")[0] for name in names}
    above = {parent for name in below for parent in (Path(name), *Path(name).parents)}
    for each in {folder.parent, folder, *(folder / parent for parent in above)}:
        sync_folder(each)
