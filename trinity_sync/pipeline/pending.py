"""Find the saves of a job whose images wait on this node, and finish what a commit has left.

Images of a save that failed are marked, so that later saves evict them first. Requests of save
functions, which have no images, are treated in the same way.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pydantic import ValidationError

from trinity_sync.errors import CommitError, FormatError, SupersededError, TrinitySyncError
from trinity_sync.saves.journal import read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.job_identity import explain_away
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, SealedImage, warn_once
from trinity_sync.snapshot.ticket import free_slot, list_components
from trinity_sync.storage.commit import finish_interrupted
from trinity_sync.storage.manifest import Manifest, read_run_manifest
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save import mark_image_failed
from trinity_sync.storage.save_functions import list_requests, remove_statuses

GRACE_S = 2.0
"""Default of ``grace_s`` of `find_pending_saves`."""


def find_pending_saves(
    job: JobSpool,
    *,
    grace_s: float = GRACE_S,
    settle_s: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> list[SaveRequest]:
    """Return the requests of saves whose images or functions nothing persists, oldest first.

    Commits that were interrupted after their manifest are finished, and their slots released.
    Within ``grace_s``, the trainer may still request the run of a sealed image itself. The process
    of a commit releases its slots within ``settle_s`` more. What waits for its root is left out.
    """
    before = clock() - grace_s
    try:
        if explain_away(job.read_root(), job.folder.name):
            return []
        found = {each.key: each for each in _find_in_job(job, grace_s, before - settle_s)}
        # these know how many functions to expect
        found |= {each.key: each for each in _find_of_functions(job, before, before - settle_s)}
    except (OSError, TrinitySyncError) as error:  # other jobs are unaffected
        warn_once(f"cannot read the images in {job.folder}: {error}")
        return []
    return sorted(found.values(), key=lambda request: (request.run, request.step))


def _find_in_job(job: JobSpool, grace_s: float, before: float) -> Iterator[SaveRequest]:
    """Yield the saves of one job whose images were all sealed more than ``grace_s`` seconds ago.

    Commits from before ``before``, in seconds since the epoch, are finished.
    """
    sealed, bad = job.tickets()
    for error in bad:
        warn_once(str(error))
    now = time.monotonic()
    saves: dict[SaveId, list[SealedImage]] = defaultdict(list)
    for image in sealed:
        saves[image.ticket.save].append(image)
    for images in saves.values():
        request = _make_request(images)
        try:
            manifest = _read_commit(job, request)
        except SupersededError as error:
            for image in images:
                if not image.failed:
                    mark_image_failed(image, str(error))
            continue
        if manifest:
            held = [each for each in images if each.ticket.image in manifest.images]
            if held and manifest.committed_at < before:  # its process may still free them
                _finish_commit(request.save, manifest, held)
            images = [each for each in images if each not in held]
        # also what was submitted after the commit, whose process is told how that ends
        if images and all(
            image.ticket.age_s(now) > grace_s and not image.failed for image in images
        ):
            yield _make_request(images)


def _make_request(images: Sequence[SealedImage]) -> SaveRequest:
    components = list_components([image.ticket for image in images])
    return SaveRequest(**vars(images[0].ticket.save), components=components)


def _find_of_functions(job: JobSpool, written: float, before: float) -> Iterator[SaveRequest]:
    """Yield the requests of save functions from before ``written`` that have not ended.

    Commits from before ``before`` are finished, as by `_find_in_job`.
    """
    for path in list_requests(job):
        try:
            if path.stat().st_mtime >= written:
                continue
            request = SaveRequest.model_validate_json(path.read_bytes())
            manifest = _read_commit(job, request)
        except FileNotFoundError:
            continue  # it has just ended
        except SupersededError as error:
            warn_once(str(error))
            path.unlink(missing_ok=True)
            continue
        except (ValidationError, FormatError) as error:
            warn_once(f"cannot read the request {path}: {error}")
            continue
        if manifest is None:
            yield request
        elif manifest.committed_at < before:
            finish_interrupted(request.save)
            remove_statuses(job, request.run, request.step, request.kind)


def _read_commit(job: JobSpool, request: SaveRequest) -> Manifest | None:
    """Return the manifest of a save that is committed, and was not submitted again since.

    It is if a remote lacked it.

    Raises:
        SupersededError: it will never be committed.
        FormatError: another release has committed the step.
    """
    save = request.save
    with suppress(CommitError):  # its run's file is torn: the save fails with that
        refuse_other_job(save, job)
    manifest = read_run_manifest(save.root, save.run, save.step)
    if request.is_in(manifest) and (request.attempt == 1 or read_entry(request)):
        return manifest
    return None


def _finish_commit(save: SaveId, manifest: Manifest, images: list[SealedImage]) -> None:
    """Finish an interrupted commit, and release the images that it holds."""
    digests = {image: record.digest for record in manifest.files for image in record.images}
    try:
        finish_interrupted(save)
        for image in images:
            free_slot(image.slot, image.ticket.image, digests[image.ticket.image])
    except (OSError, TrinitySyncError) as error:  # other saves are unaffected
        warn_once(f"{save} is committed, but cannot be finished: {error}")
