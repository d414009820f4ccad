"""Commit a step: check that it is complete, rename its files, write the manifest, update pointers.

The order matters. Before the manifest's rename a step is not committed, whatever else is in its
folder; after it, every file in the manifest is complete, has its name and is durable. Each part may
be repeated after a crash, and the commit lock of the root keeps commits apart.

It also frees the slots of committed saves, and resolves images that were submitted after the
commit.

A loop that saves the first step's state for ever, and an optimizer that does not step, commit files
that never change. So the weights and optimizer of each save are compared with those of the newest
commits before it, by the digests in the manifests. An optimizer's file also has plain values, such
as a scheduled learning rate; its tensors count as unchanged if number, norm and largest are equal.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trinity_sync.errors import (
    ManifestError,
    MissingShardsError,
    SaveError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import make_folder, pin_folder, remove_tree
from trinity_sync.fs.locks import LockFile, acquire_commit_lock
from trinity_sync.layout import FOLDERS, SERVES_AS, attaching_folder
from trinity_sync.snapshot.identity import SaveId, explain_away, require_root
from trinity_sync.snapshot.spool import JobSpool, SealedImage, mark_image_failed
from trinity_sync.snapshot.ticket import free_slot, lock_slot, read_ticket
from trinity_sync.storage.block_reuse import WORTHWHILE
from trinity_sync.storage.dcp_folder import link_step
from trinity_sync.storage.discovery import (
    list_commits_before,
    list_files_of_run,
    remove_mark,
    repair_latest_pointer,
    update_latest_pointers,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import (
    COMPARED,
    CallableRecord,
    FileRecord,
    Manifest,
    finish_manifest,
    read_manifest,
    read_run_manifest,
    write_manifest,
    write_manifest_into,
)
from trinity_sync.storage.metrics import add_metrics, read_metrics
from trinity_sync.storage.persist import digest_content, parse_image_name, unpack_image
from trinity_sync.storage.placement import describe_ranks
from trinity_sync.storage.replace import (
    clear_displaced_step,
    exclude_writes,
    is_redundant_sync,
    make_missing_file_error,
    refuse_loss,
    replace_step,
    require_named_files,
    sync_folders,
)
from trinity_sync.storage.runs import find_run_of, refuse_superseded
from trinity_sync.storage.save_functions import FunctionStatus, list_function_files, remove_statuses
from trinity_sync.storage.save_timing import SaveTiming, Stall, append_save
from trinity_sync.storage.uncommitted import Written, remove_files

logger = logging.getLogger(__name__)

UNLOCK_S = 10.0
"""Seconds for which the end of a save that has failed waits for other commits, to remove files."""


def commit(
    save: SaveId,
    written: Sequence[Written],
    statuses: Sequence[FunctionStatus] = (),
    *,
    recycle: bool = True,
    started_at: float = 0.0,
    persisted_at: float = 0.0,
    by_saver: bool = False,
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Commit a step; committing it again adds nothing and leaves its manifest as it is.

    A commit never makes the newest step of a kind an older one. A sync of the step of the newest
    checkpoint leaves that checkpoint in place if the weights are the same, byte for byte, and is
    refused otherwise.

    ``recycle`` keeps the files of a replaced step for block reuse. What drives it started at
    ``started_at``, and all files were durable at ``persisted_at``, in seconds since the epoch; 0 if
    that is unknown.

    Raises:
        MissingShardsError: ranks or components are missing, or shards of two world sizes are mixed.
        SupersededError: a later run of the job has superseded the step, or the root was recreated.
        SaveError: a file is missing or has changed since it was written; this run has committed
            other content of the step; or the newest step of a kind would be lost.
        FormatError: another release has committed the step, or has begun a run of the job.
        CommitError: this node lost the commit lock of the root to another node.
        LockTimeoutError: a save function has written into the step's folder for ten minutes.
    """
    with exclude_writes(save), acquire_commit_lock(save.root) as lock:
        require_root(save.root, save.job)
        refuse_superseded(save.root, save.run, save.run_key, save.step)
        earlier = _read_earlier(save)
        ours = earlier if earlier and earlier.run == save.run else None
        committed = {record.path: record for record in ours.files} if ours else {}
        is_retry = bool(ours and ours.has_kind(save.kind, {file.record.role for file in written}))
        if not is_retry:  # which was complete
            _check_complete(save, written, statuses)
        if ours:
            _refuse_other_content(save, written, ours, committed, is_retry=is_retry)
        manifest = _make_manifest(save, written, statuses, committed)

        def add_timing() -> Manifest:  # right before the write
            now = clock()
            timing = _measure_save(save, written, started_at, persisted_at, now, by_saver=by_saver)
            return replace(manifest, committed_at=now, timings=(timing,))

        add_metrics(save, {name: value for file in written for name, value in file.metrics.items()})
        lock.require_held()
        make_folder(folder := save.folder)
        identities = _link_equal_files(written)
        replaced = None if ours else earlier
        kept = None if earlier else list_files_of_run(save.root, folder, save.run)
        if kept is not None or (replaced and not is_redundant_sync(save, replaced, manifest)):
            refuse_loss(save, replaced, manifest.kinds)
            manifest = add_timing()
            replace_step(save, written, manifest, replaced, lock, kept or (), recycle=recycle)
        else:
            if not earlier:
                remove_mark(folder)  # the mark of a step whose manifest is gone
            _name_files(folder, written, committed, identities)
            sync_folders(folder, [file.path for file in manifest.files])
            if replaced:
                add_metrics(save, read_metrics(save.root, replaced.run, save.step))
            manifest = _add_to_step(save, earlier, add_timing(), lock)
        _update_pointers(save, manifest, lock)
        try:
            append_save(save.root, manifest)
        except OSError as error:
            logger.warning("%s is committed; cannot add it to the log of saves: %s", save, error)
        clear_displaced_step(save.root, save.step, keep=manifest.nbytes if recycle else 0)
        for kind in replaced.list_lost(manifest.kinds) if replaced else ():
            repair_latest_pointer(save.root, kind)  # of a checkpoint that a sync has replaced
        _remove_other_attempts(save, written)
    fresh = tuple(record for record in manifest.files if record.path not in committed)
    for problem in replace(manifest, files=fresh).alarms:
        logger.warning("%s is committed, but %s", save, problem)
    return manifest


def _make_manifest(
    save: SaveId,
    written: Sequence[Written],
    statuses: Sequence[FunctionStatus],
    committed: Mapping[str, FileRecord],
) -> Manifest:
    """Return the manifest of a save alone; the time of its commit is added right before it."""
    named = {file.record.path for file in written}
    own = list_function_files(save, statuses, named, committed)
    files = (*_compare_with_last_commit(save, [file.record for file in written]), *own)
    # a checkpoint with weights is also a sync, and what functions of the user write is unknown
    has_weights = statuses or any(record.is_weights for record in files)
    return Manifest(
        job=save.job,
        run=save.run,
        run_key=save.run_key,
        step=save.step,
        kinds=SERVES_AS[save.kind] if has_weights else (save.kind,),
        files=files,
        callables=tuple(CallableRecord(s.name, s.rank, s.seconds, s.files) for s in statuses),
        committed_at=0.0,
        exports={file.record.role: file.export for file in written if file.export},
        keep=max((file.keep for file in written), default=0),
    )


def _add_to_step(
    save: SaveId, earlier: Manifest | None, manifest: Manifest, lock: LockFile
) -> Manifest:
    """Write the manifest of a save whose files are named, with what the step has already.

    Return the manifest of the save; a retry has the time of the first commit, and writes nothing.
    """
    merged = earlier.merge(manifest) if earlier else manifest
    is_kept = earlier and earlier.run < save.run and earlier.serves("checkpoint")
    if earlier and is_kept and not manifest.serves("checkpoint"):
        merged = replace(merged, checkpoint_run=find_run_of(earlier, "checkpoint"))
    if earlier and replace(merged, committed_at=earlier.committed_at) == earlier:
        finish_manifest(save.root, save.step)
        return replace(manifest, committed_at=earlier.committed_at)
    require_named_files(save, folder := save.folder, merged)
    lock.require_held()
    write_manifest_into(folder, merged)
    return manifest


def finish_interrupted(save: SaveId) -> None:
    """Finish a commit whose process may have died right after it wrote the manifest.

    Nothing is done if the step is not committed, or superseded. Waits while another commit is in
    flight in the root.
    """
    if not read_manifest(save.root, save.step, ranks=()):
        return
    with acquire_commit_lock(save.root) as lock:
        manifest = read_manifest(save.root, save.step, ranks=())
        if manifest is None or manifest.run != save.run:
            return
        try:
            require_root(save.root, save.job)
            refuse_superseded(save.root, save.run, save.run_key, save.step)
        except SaveError as error:
            logger.info("%s", error)
        else:
            _update_pointers(save, manifest, lock)


def _update_pointers(save: SaveId, manifest: Manifest, lock: LockFile) -> None:
    """Update the latest pointers, and link the files of a DCP checkpoint where its caller looks."""
    lock.require_held()
    update_latest_pointers(save.root, manifest)
    for role in save.roles:
        try:
            link_step(save.root, save.step, role)
        except (OSError, TrinitySyncError) as error:  # which the caller of DCP raises as well
            logger.warning("%s is committed, and not linked where DCP reads it: %s", save, error)


def _check_complete(
    save: SaveId, written: Sequence[Written], statuses: Sequence[FunctionStatus]
) -> None:
    problems = [] if written or statuses else ["nothing was submitted"]
    for role in save.roles:
        files = [file for file in written if file.record.role == role]
        whole = {name for file in files for name in file.replicated}
        shards = [file for file in files if file.record.component not in {*FOLDERS, *whole}]
        sizes = {file.record.world_size for file in shards}
        if len(sizes) > 1:
            problems.append(f"role {role} mixes shards of world sizes {sorted(sizes)}")
        have: dict[str, set[int]] = defaultdict(set)
        submissions: dict[int, set[float]] = defaultdict(set)
        for file in files:
            have[file.record.component].add(file.record.rank)
            submissions[file.record.rank] |= {file.sealed_s} - {0.0}
        if mixed := [rank for rank, found in submissions.items() if len(found) > 1]:
            problems.append(f"role {role} mixes two submissions of {describe_ranks(mixed)}")
        for component in {name for file in files for name in file.components}:
            ranks: Iterable[int] = range(max(sizes, default=1))
            if component == "metadata" or component in whole:
                ranks = range(1)
            elif component == "attachments":  # a rank has some or none
                ranks = sorted({f.record.rank for f in files if component in f.components})
            absent = [rank for rank in ranks if rank not in have[component]]
            if absent:
                problems.append(f"role {role} lacks {component} of {describe_ranks(absent)}")
    if problems:
        raise MissingShardsError(
            f"{save} is not committed: {'; '.join(problems)}. Check whether a rank died before it "
            "submitted its part. Later saves are unaffected."
        )


def _refuse_other_content(
    save: SaveId,
    written: Sequence[Written],
    ours: Manifest,
    committed: Mapping[str, FileRecord],
    *,
    is_retry: bool,
) -> None:
    """Refuse to commit a file again with other content, or in a retry another file of the save.

    Raises:
        SaveError: this run, or the one whose checkpoint it left in place, has committed the file
            with other bytes; or this run has committed the save without it.
    """
    of_sync = save.kind == "state_dict"  # a role without weights has none
    # a checkpoint is the sync of its step, too
    whole = is_retry and not (of_sync and ours.serves("checkpoint"))
    roles = {each.role for each in committed.values() if each.is_weights or not of_sync}
    for record in (file.record for file in written):
        known = committed.get(record.path)
        if known and known.digest != record.digest:
            raise SaveError(
                f"{save} is not committed: run {ours.checkpoint_run or save.run} has committed "
                f"{known.path} of that step with other content, which stays. Save a changed state "
                "as another step."
            )
        if whole and not known and record.role in roles:
            raise SaveError(
                f"{save} is not committed again: run {save.run} has committed that step without "
                f"{record.path}. Submit all components of a step in one call."
            )


def _remove_other_attempts(save: SaveId, written: Sequence[Written]) -> None:
    """Remove the temporary files of other attempts to save the same images, and attached files."""
    images = {image for file in written for image in file.record.images}
    for name in {file.record.path.rpartition("/")[0] for file in written}:
        with pin_folder(save.folder / name) as folder:
            names = (entry.name for entry in os.scandir(folder))
            remove_files(folder / name for name in names if parse_image_name(name) in images)
    attaching = attaching_folder(save.root)
    for name in {Path(f.attached).relative_to(attaching).parts[0] for f in written if f.attached}:
        with suppress(OSError):
            remove_tree(attaching / name)


def _read_earlier(save: SaveId) -> Manifest | None:
    """Return the manifest of what the step has, which may be an earlier run's, or other roles'.

    Raises:
        SupersededError: it is a later run's.
    """
    try:
        earlier = read_manifest(save.root, save.step)
    except ManifestError as error:
        logger.warning("%s replaces a step without a valid manifest: %s", save, error)
        return None
    if earlier and earlier.run > save.run:
        raise SupersededError(
            f"{save} is superseded: run {earlier.run} has committed step {save.step}"
        )
    return earlier


def _link_equal_files(written: Sequence[Written]) -> dict[str, set[tuple[int, int]]]:
    """Make large files with the same bytes one file, as of ranks that did not say `replicated`.

    Return the identities that the files of each digest may have: an earlier attempt to commit may
    have linked some of them, and named the others.
    """
    equal: dict[str, list[Written]] = defaultdict(list)
    for file in written:
        equal[file.record.digest].append(file)
    for files in equal.values():
        large = [file for file in files if file.temporary and file.record.nbytes >= WORTHWHILE]
        for path in (Path(file.temporary) for file in large[1:]):
            first = large[0].temporary
            # no hard links here, or an earlier attempt named one of them
            with suppress(OSError), pin_folder(path.parent) as folder:
                link = folder / f".equal{path.name}"
                if not path.samefile(first):
                    link.hardlink_to(first)
                    link.replace(folder / path.name)
    return {digest: {file.identity for file in files} for digest, files in equal.items()}


def _name_files(
    step: Path,
    written: Sequence[Written],
    committed: Mapping[str, FileRecord],
    identities: Mapping[str, set[tuple[int, int]]],
) -> None:
    by_folder = defaultdict[str, list[Written]](list)
    for file in written:
        by_folder[file.record.path.rpartition("/")[0]].append(file)
    for name, of_folder in by_folder.items():
        make_folder(step / name)  # which another node's disk lacks
        with pin_folder(step / name) as folder:
            for file in of_folder:
                known = committed.get(file.record.path)
                _name(file, folder, known, identities[file.record.digest])


def _name(
    file: Written, folder: Path, committed: FileRecord | None, identities: set[tuple[int, int]]
) -> None:
    """Rename a written file in its pinned folder to its final name, unless an earlier attempt did.

    A file that this run has committed, e.g. with the sync of the step, is never overwritten.
    """
    temporary, name = (p.rpartition("/")[2] for p in (file.temporary, file.record.path))
    temporary, final = f"{folder}/{temporary}", f"{folder}/{name}"  # a Path takes twice the time
    if file.temporary:
        with suppress(FileNotFoundError):  # an earlier attempt named it
            if committed:
                os.unlink(temporary)  # noqa: PTH108
            else:
                os.replace(temporary, final)  # noqa: PTH105
    try:
        found = os.lstat(final)
        same = found.st_size == (committed or file.record).nbytes
        if file.temporary and not committed:
            same = same and (found.st_ino, found.st_mtime_ns) in identities
    except FileNotFoundError as error:
        raise make_missing_file_error(file, f"{folder.readlink()}/{name}") from error
    if not same:
        raise SaveError(f"{folder.readlink()}/{name} changed before its commit; retry the save")


def remove_uncommitted(save: SaveId, written: Sequence[Written]) -> None:
    """Remove the files of a save that has failed, where possible.

    Also those that its commit has named: without the manifest, for which a full disk may have had
    no room, they would take the room of later steps.
    """
    remove_files(Path(file.temporary) for file in written if file.temporary)
    own = {file.identity for file in written if file.temporary}
    with suppress(OSError, TrinitySyncError):
        require_root(save.root, save.job)
        with acquire_commit_lock(save.root, limit_s=UNLOCK_S):
            manifest = read_manifest(save.root, save.step)
            committed = {record.path for record in manifest.files} if manifest else ()
            paths = {file.record.path for file in written if file.temporary}.difference(committed)
            for path in map(save.folder.joinpath, paths):
                with pin_folder(path.parent) as folder, suppress(FileNotFoundError):
                    found = (folder / path.name).lstat()
                    if (found.st_ino, found.st_mtime_ns) in own:
                        (folder / path.name).unlink()


def free_committed_slots(spool: JobSpool, save: SaveId, written: Sequence[Written]) -> None:
    """Free this node's slots of a committed save, whose files its tasks here have written.

    Until the next save fills a slot, `load_shards` finds the committed file in it.
    """
    spool.note_commit(save)
    digests = {image: file.record.digest for file in written for image in file.record.images}
    for sealed in spool.read_step(save):
        if sealed.ticket.kind not in SERVES_AS[save.kind]:
            continue  # it belongs to the checkpoint, even if it shares the image of the sync
        if sealed.ticket.image in digests:
            free_slot(sealed.slot, sealed.ticket.image, digests[sealed.ticket.image])
        elif save.owns(sealed.ticket):
            resolve_late_image(save, sealed)
    remove_statuses(spool, save)


def resolve_late_image(save: SaveId, sealed: SealedImage) -> None:
    """Free an image whose save is committed, or mark it as failed.

    An image that equals the committed file byte for byte joins the manifest: it is a state that was
    submitted again. Any other image is marked as failed, and evicted first.

    Raises:
        CommitError: this node lost the commit lock of the root to another node.
        OSError: the root cannot be read or written.
    """
    if sealed.failed:
        return
    ticket = sealed.ticket
    try:
        with lock_slot(sealed.slot) as content:
            now = read_ticket(sealed.slot)
            if now is None or now.image != ticket.image:
                return
            files = unpack_image(ticket, content[: ticket.nbytes])
            digests = {path: digest_content(each) for path, each in files}
    except FileNotFoundError:
        return
    with acquire_commit_lock(save.root) as lock:
        if explain_away(save.root, save.job):
            return
        manifest = read_run_manifest(save.root, save.run, save.step)
        records = [manifest.find_file(path) if manifest else None for path in digests]
        same = [r for r in records if r and r.digest == digests[r.path]]
        if manifest and len(same) == len(digests):
            merged = [replace(r, images=(*r.images, ticket.image)) for r in same]
            lock.require_held()
            write_manifest(save.root, manifest.merge(replace(manifest, files=tuple(merged))))
            free_slot(sealed.slot, ticket.image, digests.get(ticket.path, ""))
            return
    found = "with other content" if manifest else "and has been removed or replaced since"
    reason = (
        f"{ticket.what} is not saved: the {save.kind} of that step was committed in {save.root} "
        f"without it, {found}. Submit a step in one call, and a changed state as another step."
    )
    mark_image_failed(sealed, reason)
    logger.error("%s", reason)


def _compare_with_last_commit(save: SaveId, files: Sequence[FileRecord]) -> list[FileRecord]:
    """Return the records with the step since which each is unchanged, as of the last commit.

    Each is compared with the newest commit that has its file, of the two that the latest pointers
    name. Call it under the commit lock, before they are updated.
    """
    frozen = {*read_job_settings(save.root).frozen.split(",")}
    left = {
        file.path: file
        for file in files
        if file.component in COMPARED
        and not {file.role, f"{file.role}/{file.component}"} & frozen
        and not (file.component == "optim" and file.health and not file.health.tensors)  # as SGD's
    }
    since: dict[str, int | None] = {}
    for before in list_commits_before(save) if left else ():
        for known in before.files:
            if (now := left.pop(known.path, None)) and _is_unchanged(known, now):
                is_first = known.unchanged_since is None
                since[known.path] = before.step if is_first else known.unchanged_since
    return [replace(each, unchanged_since=since.get(each.path)) for each in files]


def _is_unchanged(before: FileRecord, now: FileRecord) -> bool:
    if before.digest == now.digest:
        return True
    values = now.health
    return now.component == "optim" and bool(values and values.norm) and before.health == values


def _measure_save(
    save: SaveId,
    written: Sequence[Written],
    started_at: float,
    persisted_at: float,
    committed_at: float,
    *,
    by_saver: bool,
) -> SaveTiming:
    """Return how long a save took. All times are seconds since the epoch.

    ``started_at`` is when its driver started, ``persisted_at`` when all files were durable; 0 if
    that is unknown. ``committed_at`` is when the manifest is written.
    """
    own = [file for file in written if file.submitted_at]  # others are of another save of the step
    submitted_at = max((file.submitted_at for file in own), default=0.0)
    slowest = {file.record.role: file for file in sorted(own, key=lambda file: file.stall_s)}
    return SaveTiming(
        kind=save.kind,
        roles=save.roles,
        stalls=tuple(
            Stall(role, file.record.rank, file.stall_s) for role, file in sorted(slowest.items())
        ),
        submitted_at=submitted_at or started_at or committed_at,
        # the clocks of two nodes may disagree
        queue_s=max(started_at - submitted_at, 0.0) if started_at and submitted_at else 0.0,
        write_s=max(persisted_at - started_at, 0.0),
        commit_s=max(committed_at - persisted_at, 0.0) if persisted_at else 0.0,
        nbytes=sum(file.record.nbytes for file in written if file.temporary),
        ranks=len({(file.record.role, file.record.rank) for file in own}),
        nodes=len({file.node for file in own}),
        by_saver=by_saver,
    )
