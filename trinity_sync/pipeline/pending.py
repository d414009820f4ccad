"""Find the saves of a job whose images wait on this node, and finish what a commit has left.

Images of a save that failed are marked, so that later saves evict them first. Requests of save
functions, which have no images, are treated in the same way.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import (
    CommitError,
    FormatError,
    SaveError,
    SupersededError,
    TrinitySyncError,
    warn_once,
)
from trinity_sync.fs.atomic import read_file
from trinity_sync.layout import Kind
from trinity_sync.saves.journal import append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.snapshot.spool import JobSpool, SealedImage, mark_image_failed
from trinity_sync.snapshot.ticket import failure_path, free_slot, list_components
from trinity_sync.storage.commit import finish_interrupted
from trinity_sync.storage.manifest import Manifest, read_run_manifest
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save_functions import list_requests, remove_statuses

GRACE_S = 2.0
"""Default of ``grace_s`` of `find_pending_saves`."""


def find_pending_saves(
    job: JobSpool,
    *,
    grace_s: float = GRACE_S,
    settle_s: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> dict[SaveRequest, float]:
    """Return the requests of saves whose images or functions nothing persists, oldest first.

    Each has the seconds for which it has waited, infinite after a reboot or a clock that was set
    back. Commits that were interrupted after their manifest are finished, and their slots released.
    Within ``grace_s``, the trainer may still request the run of a sealed image itself. The process
    of a commit releases its slots within ``settle_s`` more. What waits for its root is left out.
    """
    now = clock()
    found: dict[str, tuple[SaveRequest, float]] = {}
    try:
        for request, images, path, age_s in _list_waiting(job, now):
            if path and age_s <= grace_s:
                continue
            try:
                manifest = _read_commit(job, request)
            except SupersededError as error:
                for image in images:
                    if not image.failed:
                        mark_image_failed(image, str(error))
                if path:
                    warn_once(str(error))
                    path.unlink(missing_ok=True)
                continue
            except FormatError as error:  # of another release; other steps are unaffected
                warn_once(str(error))
                continue
            held = [each for each in images if manifest and each.ticket.image in manifest.images]
            settled_s = _measure_age(now, manifest.committed_at) if manifest else 0.0
            if manifest and (held or path) and settled_s > grace_s + settle_s:
                _finish_commit(job, request, manifest, held)
            # also what was submitted after the commit, whose process is told how that ends
            rest = [each for each in images if each not in held]
            if path and manifest is None:  # which knows how many functions to expect
                found[request.key] = request, age_s
            elif rest and age_s > grace_s and not any(image.failed for image in rest):
                found[request.key] = _make_request(rest), age_s
    except (OSError, TrinitySyncError) as error:  # other jobs are unaffected
        warn_once(f"cannot read the images in {job.folder}: {error}")
    return dict(sorted(found.values(), key=lambda each: (each[0].run, each[0].step)))


def retry_images(job: JobSpool, run: int, step: int, kind: Kind) -> None:
    """Have a saver of this node take what failed of a save; the journal gets another start of it.

    Raises:
        SaveError: none of its images is in memory any longer.
    """
    images = [
        each
        for each in job.tickets()[0]
        if (each.ticket.run, each.ticket.step, each.ticket.kind) == (run, step, kind)
    ]
    if not images:
        raise SaveError(
            f"{kind} of step {step} (run {run}) has no image in {job.folder} any longer, so it "
            "cannot be saved again. Later saves are unaffected"
        )
    # a run that was lost with a restored root may have had the number
    request = _make_request([max(images, key=lambda each: each.ticket.monotonic_s)])
    told = read_entry(request)
    if told is None or told.has_failed:
        append(request, "begun", start=told.start + 1 if told else 1)
    for each in job.read_save(request.save):
        failure_path(each.slot).unlink(missing_ok=True)


def _list_waiting(
    job: JobSpool, now: float
) -> Iterator[tuple[SaveRequest, list[SealedImage], Path | None, float]]:
    """Yield the saves that wait, with their images, or the file of a request of functions.

    And their age in seconds: of images, that of the newest.
    """
    sealed, bad = job.tickets()
    for error in bad:
        warn_once(str(error))
    saves: dict[SaveId, list[SealedImage]] = defaultdict(list)
    for image in sealed:
        saves[image.ticket.save].append(image)
    for images in saves.values():
        age_s = min(image.ticket.age_s(time.monotonic()) for image in images)
        yield _make_request(images), images, None, age_s
    for path in list_requests(job):
        try:
            age_s = _measure_age(now, path.stat().st_mtime)
            yield SaveRequest.model_validate_json(read_file(path)), [], path, age_s
        except FileNotFoundError:
            continue  # it has just ended
        except (ValueError, FormatError) as error:
            warn_once(f"cannot read the request {path}: {error}")


def _measure_age(now: float, at: float) -> float:
    """Return the seconds since a time; infinite if the clock was set back since."""
    return now - at if at <= now + GRACE_S else math.inf


def _make_request(images: Sequence[SealedImage]) -> SaveRequest:
    components = list_components([image.ticket for image in images])
    return SaveRequest(**vars(images[0].ticket.save), components=components)


def _read_commit(job: JobSpool, request: SaveRequest) -> Manifest | None:
    """Return the manifest of a save that is committed, and was not submitted again since.

    It is if a remote lacked it.

    Raises:
        SupersededError: it will never be committed.
        FormatError: another release has committed the step.
    """
    save = request.save
    with suppress(CommitError, OSError):  # its run's file is torn: the save fails with that
        refuse_other_job(save, job)
    with suppress(OSError):
        manifest = read_run_manifest(save.root, save.run, save.step)
        if request.is_in(manifest) and (request.attempt == 1 or read_entry(request)):
            return manifest
    return None


def _finish_commit(
    job: JobSpool, request: SaveRequest, manifest: Manifest, images: list[SealedImage]
) -> None:
    """Finish an interrupted commit, and release the images that it holds, or its functions."""
    digests = {image: record.digest for record in manifest.files for image in record.images}
    try:
        finish_interrupted(request.save)
        for image in images:
            free_slot(image.slot, image.ticket.image, digests[image.ticket.image])
        if not images:
            remove_statuses(job, request.save)
    except (OSError, TrinitySyncError) as error:  # other saves are unaffected
        warn_once(f"{request.save} is committed, but cannot be finished: {error}")
