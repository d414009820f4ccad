"""Find the saves of a job whose images wait on this node, and finish what a commit has left.

Images of a save that failed are marked, so that later saves evict them first. Requests of save
functions, which have no images, are treated in the same way.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

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
    try:
        if explain_away(job.read_root(), job.folder.name):
            return []
        before = clock() - grace_s
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
    for save, images in saves.items():
        try:
            refuse_other_job(save, job)
        except SupersededError as error:
            for image in images:
                if not image.failed:
                    mark_image_failed(image, str(error))
            continue
        except CommitError:
            pass  # its run's file is torn: the save fails with that
        request = _make_request(save, images)
        manifest = read_run_manifest(save.root, save.run, save.step)
        if manifest and _is_committed(request, manifest):
            held = [each for each in images if each.ticket.image in manifest.images]
            _finish_commit(save, manifest, held, before)
            images = [each for each in images if each not in held]
        # also what was submitted after the commit, whose process is told how that ends
        if images and all(
            image.ticket.age_s(now) > grace_s and not image.failed for image in images
        ):
            yield _make_request(save, images)


def _make_request(save: SaveId, images: Sequence[SealedImage]) -> SaveRequest:
    components = list_components([image.ticket for image in images])
    return SaveRequest(**vars(save), components=components)


def _find_of_functions(job: JobSpool, written: float, before: float) -> Iterator[SaveRequest]:
    """Yield the requests of save functions from before ``written`` that have not ended.

    Commits from before ``before`` are finished, as by `_find_in_job`.
    """
    for path in list_requests(job):
        try:
            if path.stat().st_mtime >= written:
                continue
            request = SaveRequest.model_validate_json(path.read_bytes())
            save = request.save
            manifest = read_run_manifest(save.root, save.run, save.step)
            refuse_other_job(save, job)
        except FileNotFoundError:
            continue  # it has just ended
        except SupersededError as error:
            warn_once(str(error))
            path.unlink(missing_ok=True)
            continue
        except CommitError:
            pass  # as above
        except (ValidationError, FormatError) as error:
            warn_once(f"cannot read the request {path}: {error}")
            continue
        if not (manifest and _is_committed(request, manifest)):
            yield request
        elif manifest.committed_at < before:
            finish_interrupted(save)
            remove_statuses(job, save.run, save.step, save.kind)


def _is_committed(request: SaveRequest, manifest: Manifest) -> bool:
    """Return whether a save is committed, and was not submitted again since: a remote lacked it."""
    return request.is_in(manifest) and (request.attempt == 1 or read_entry(request) is not None)


def _finish_commit(
    save: SaveId, manifest: Manifest, images: list[SealedImage], before: float
) -> None:
    """Finish an interrupted commit, and release the images that it holds."""
    if not images or manifest.committed_at >= before:
        return  # the commit task may still be releasing the slots
    digests = {image: record.digest for record in manifest.files for image in record.images}
    try:
        finish_interrupted(save)
        for image in images:
            free_slot(image.slot, image.ticket.image, digests[image.ticket.image])
    except (OSError, TrinitySyncError) as error:  # other saves are unaffected
        warn_once(f"{save} is committed, but cannot be finished: {error}")
