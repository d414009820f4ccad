"""The commit: check that all is there, name every file, write the manifest, update the pointers.

The order is the promise. Before the manifest's rename a step is not committed, whatever else is in
its folder; after it, every file that it names is whole, named and durable. Each part may be done
again after a crash, and one lock a root keeps commits from crossing each other.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import (
    ManifestError,
    MissingShardsError,
    SaveError,
    SupersededError,
)
from trinity_sync.fs.atomic import (
    make_folder,
    sync_folder,
)
from trinity_sync.fs.locks import one_change_at_a_time
from trinity_sync.layout import (
    FOLDERS,
    FULL_CHECKPOINT_MARK,
    SERVES_AS,
    Kind,
    job_id,
    step_folder,
)
from trinity_sync.snapshot.callable_status import CallableStatus
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.corruption import remove_mark
from trinity_sync.storage.latest_pointer import advance_latest_pointer, repair_latest_pointer
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    ReceiptRecord,
    read_manifest,
    write_manifest_into,
)
from trinity_sync.storage.persist import image_of_temporary
from trinity_sync.storage.placement import describe_ranks
from trinity_sync.storage.receipts import list_function_files
from trinity_sync.storage.replace import (
    inherit_exports_and_metrics,
    is_covered_by,
    refuse_loss,
    replace_step,
    sync_folders,
    vanished_error,
)
from trinity_sync.storage.runs import refuse_superseded
from trinity_sync.storage.save import Written, discard, remove_files

logger = logging.getLogger(__name__)


def commit(
    save: SaveId,
    written: Sequence[Written],
    receipts: Sequence[CallableStatus] = (),
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
        refuse_superseded(save.root, save.run, save.run_key, save.step)
        earlier = _earlier(save)
        roles = {file.record.role for file in written}
        if not (earlier and earlier.run == save.run and earlier.holds(save.kind, roles)):
            _check_complete(save, written, receipts)  # else it is retried, and all is there
        ours = earlier.files if earlier and earlier.run == save.run else ()
        committed = {record.path: record for record in ours}
        _refuse_other_content(save, written, committed)
        named = {file.record.path for file in written} | committed.keys()
        files = (*(file.record for file in written), *list_function_files(save, receipts, named))
        manifest = Manifest(
            job=job_id(save.root),
            run=save.run,
            step=save.step,
            kinds=served_kinds(save.kind, files, receipts),
            files=files,
            receipts=tuple(ReceiptRecord(r.name, r.rank, r.seconds, r.files) for r in receipts),
            committed_at=clock(),
        )
        lock.require_ours()
        make_folder(save.folder)
        if earlier and earlier.run > save.run:
            raise SupersededError(
                f"{save} is superseded: run {earlier.run} has committed its own step {save.step}"
            )
        replaced = earlier if earlier and earlier.run < save.run else None
        if replaced and not is_covered_by(save, replaced, manifest):
            refuse_loss(save, replaced, manifest)
            replace_step(save, written, manifest, replaced, lock, recycle=recycle)
        else:
            if not earlier:
                remove_mark(save.folder)  # of a step whose manifest is gone
            for file in written:
                final = f"{save.folder}/{file.record.path}"
                _name(file, final, committed.get(file.record.path))
            sync_folders(save.folder, [file.path for file in manifest.files])
            if replaced:
                inherit_exports_and_metrics(save, replaced)
            lock.require_ours()
            write_manifest_into(save.folder, earlier.joined(manifest) if earlier else manifest)
        lock.require_ours()
        update_latest_pointers(save.root, manifest)
        if replaced:
            for kind in {*replaced.kinds} - {*manifest.kinds}:  # a sync in a checkpoint's place
                repair_latest_pointer(save.root, kind)
        _remove_other_attempts(save, written)
    return manifest


def finish_interrupted(save: SaveId) -> None:
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
            refuse_superseded(save.root, save.run, save.run_key, save.step)
        except SupersededError as error:
            logger.info("%s", error)
        else:
            lock.require_ours()
            update_latest_pointers(save.root, manifest)


def update_latest_pointers(root: str | Path, manifest: Manifest) -> None:
    """Mark a committed step and update the latest pointers to it; under the commit lock.

    Args:
        root: the job's root.
        manifest: of the step.
    """
    folder = step_folder(root, manifest.step)
    if "checkpoint" in manifest.kinds:
        (folder / FULL_CHECKPOINT_MARK).touch()
    sync_folder(folder)
    for kind in manifest.kinds:
        advance_latest_pointer(root, kind, manifest.run, manifest.step)


def _check_complete(
    save: SaveId, written: Sequence[Written], receipts: Sequence[CallableStatus]
) -> None:
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
            problems.append(
                f"role {role} mixes what {describe_ranks(mixed)} submitted at two times"
            )
        for component in {name for file in files for name in file.components}:
            ranks: Iterable[int] = range(max(sizes, default=1))
            if component == "metadata":
                ranks = range(1)
            elif component == "attachments":  # a rank has some or none
                ranks = sorted({f.record.rank for f in files if component in f.components})
            absent = [rank for rank in ranks if rank not in have[component]]
            if absent:
                problems.append(f"role {role} lacks {component} of {describe_ranks(absent)}")
    if problems:
        raise MissingShardsError(
            f"{save} is not committed: {'; '.join(problems)}. Did a rank die before it handed its "
            "part over? The next save goes on without this one."
        )


def served_kinds(
    kind: Kind, files: Iterable[FileRecord], receipts: Sequence[CallableStatus]
) -> tuple[Kind, ...]:
    """Return the kinds that a save serves as: a checkpoint is also a sync if it holds weights.

    What a user's functions wrote is unknown, so theirs serves as both.

    Args:
        kind: of the save.
        files: that it wrote.
        receipts: of its functions.
    """
    weights = receipts or any(record.component == "model" for record in files)
    return SERVES_AS[kind] if weights else (kind,)


def _refuse_other_content(
    save: SaveId, written: Sequence[Written], committed: Mapping[str, FileRecord]
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


def _remove_other_attempts(save: SaveId, written: Sequence[Written]) -> None:
    """Remove what other attempts to save the same images have written, or died at."""
    images = {image for file in written for image in file.record.images}
    for folder in {(save.folder / file.record.path).parent for file in written}:
        names = (entry.name for entry in os.scandir(folder))
        remove_files(folder / name for name in names if image_of_temporary(name) in images)


def _earlier(save: SaveId) -> Manifest | None:
    try:
        return read_manifest(save.root, save.step)
    except ManifestError as error:
        logger.warning("%s replaces what is not a commit: %s", save, error)
        return None


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
        raise vanished_error(file, final) from error
    if not same:
        raise SaveError(f"{final} was changed before its commit; retry the flow run")
