"""What has become of a save: one table for what waits for saves and for what lists them.

`decide` is the table, and reads nothing. The manifest tells what is committed, the journal who
works on a save and how that ended, the node's memory what waits: `PendingSave` reads them for the
process that has submitted a save.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from trinity_sync.errors import LockTimeoutError, TrinitySyncError, warn_once
from trinity_sync.fs.atomic import ReadOnChange, read_file
from trinity_sync.layout import MANIFEST, SERVES_AS
from trinity_sync.saves.journal import Entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.identity import explain_away
from trinity_sync.snapshot.spool import JobSpool, SealedImage, mark_image_failed
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.commit import resolve_late_image
from trinity_sync.storage.discovery import find_newest, latest_pointer_covers, read_latest_pointer
from trinity_sync.storage.job_settings import is_replicated, read_job_settings
from trinity_sync.storage.manifest import Manifest, read_run_manifest, read_run_number
from trinity_sync.storage.runs import is_superseded
from trinity_sync.storage.save_functions import read_statuses, remove_request

SaveStatus = Literal[
    "submitted", "begun", "left", "committed", "done",
    "removed", "not exported", "not replicated", "superseded", "failed",
]  # fmt: skip
SUCCESSES: tuple[SaveStatus, ...] = "done", "removed"
FAILURES: tuple[SaveStatus, ...] = "not exported", "not replicated", "superseded", "failed"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a save at one look."""

    told: Entry | None = None
    """What the journal or its flow run tells of its last attempt."""
    is_committed: bool = False
    """Whether its run has committed it, with what this process has submitted."""
    counts: bool = True
    """Whether the latest pointers cover it, and a required remote has it."""
    is_exported: bool = True
    """Whether the models that it requests are part of the step."""
    marked: str | None = None
    """Why its images in memory are marked as failed; None if they are not."""
    is_gone: bool = False
    """Whether its step was removed or replaced after the commit."""
    is_superseded: bool = False
    """Whether a later run goes on from an earlier step."""


def decide(facts: Facts) -> tuple[SaveStatus, str]:
    """Return the status of a save, and why it is not done, if anything tells that."""
    told = facts.told
    is_counted = facts.is_committed and facts.counts
    if is_counted and facts.is_exported:
        return "done", ""
    if told and told.state == "completed" and facts.is_gone:
        return "removed", ""
    if told and told.has_ended:
        missed: SaveStatus = "failed"
        if facts.is_committed:
            missed = "not exported" if is_counted else "not replicated"
        elif facts.is_superseded:
            missed = "superseded"
        return missed, told.message if told.has_failed else facts.marked or ""
    if facts.is_committed:
        return "committed", ""
    if facts.marked is not None:
        return "superseded" if facts.is_superseded else "failed", facts.marked
    if told:
        return "left" if told.is_left else "begun", told.message
    return "submitted", ""


logger = logging.getLogger(__name__)


@dataclass
class PendingSave:
    """A submitted save that is not known to have ended."""

    request: SaveRequest
    since: float
    """When it was submitted (monotonic)."""
    look_at: float
    """When the root is to be looked at next (monotonic)."""
    submitted_at: float
    """When it was submitted, in seconds since the epoch."""
    rank: int = 0
    images: set[str] = field(default_factory=set)
    """Random names of this process's images; all of them have to be part of the commit."""
    exports: set[str] = field(default_factory=set)
    """Roles whose models are to be exported after the commit."""
    committed: bool = False
    """Whether the last `find_result` has found it committed."""
    manifest: Manifest | None = None
    """What this run has committed of the step, as of the last look."""
    troubled: bool = False
    """Whether it was logged already that its status cannot be read."""

    @cached_property
    def _manifest_file(self) -> ReadOnChange[Manifest | None]:
        save = self.request.save

        def read() -> Manifest | None:  # with this rank's files; those of exports are rank 0's
            ranks = {self.rank, 0} if self.exports else {self.rank}
            return read_run_manifest(save.root, save.run, save.step, ranks=ranks)

        return ReadOnChange(save.folder / MANIFEST, read)

    def find_result(self, entry: Entry | None, spool: JobSpool) -> str | None:
        """Return why the save failed, empty for one that succeeded; None if it has not ended.

        ``entry`` is what the journal tells. Images that wait although the save has completed are
        compared with the commit. A saver that asks for its flow run does the same.

        Raises:
            OSError, TrinitySyncError: the root or the spool cannot be read.
        """
        facts = self._read_facts(entry, spool)
        status, why = decide(facts)
        if status == "removed":
            logger.info(
                "%s of %s was committed, and has been removed or replaced since",
                self.request.run_name,
                self.request.root,
            )
        if status in SUCCESSES:
            return ""
        if entry is None or status not in FAILURES:
            return None
        missed = self._describe_missed(status)
        why = facts.marked or why or f"it completed without that step being {missed}"
        where = f" (trinity-sync runs {self.request.root}, {entry.url})" if entry.url else ""
        return f"{self.describe(missed)}: {why}{where}"

    def _read_facts(self, entry: Entry | None, spool: JobSpool) -> Facts:
        facts = self._read_commit(entry)
        if entry is None or not entry.has_ended or decide(facts)[0] == "done":
            return facts
        if entry.has_failed and not self.request.is_in(self.manifest):
            return facts
        if explain_away(self.request.root, self.request.job):
            return self._read_commit(None)
        late = self._find_late_images(spool)
        unresolved = [image for image in late if not image.failed]
        for image in unresolved:
            resolve_late_image(self.request.save, image)
        if unresolved:
            return self._read_commit(None)  # the next look finds the result
        # the statuses of functions that have run since the commit, which removes statuses
        runs = read_statuses(spool, self.request.save)
        is_gone = not late and not any(runs) and self._is_gone()
        # read again: an image may just have joined the commit
        return replace(self._read_commit(entry), marked=_why_failed(late), is_gone=is_gone)

    def _read_commit(self, entry: Entry | None) -> Facts:
        """Return what manifest and latest pointers tell, next to what the journal does."""
        self.committed, manifest = False, self._manifest_file.get()
        self.manifest = manifest
        if not (manifest and self.request.is_in(manifest) and self.images <= manifest.images):
            return Facts(told=entry)
        self.committed = self._counts(manifest)
        has_models = all(map(manifest.is_exported, self.exports))
        return Facts(told=entry, is_committed=True, counts=self.committed, is_exported=has_models)

    def describe(self, missed: str) -> str:
        """Return the beginning of a failure: what was not reached."""
        return f"{self.request.run_name} of {self.request.root} was not {missed}"

    def _find_late_images(self, spool: JobSpool) -> list[SealedImage]:
        """Return this process's images that wait in the spool and are not part of the commit.

        Images that are part of it are freed, also where the step has been removed since.
        """
        missing = self.images - (self.manifest.images if self.manifest else frozenset())
        sealed = spool.read_step(self.request.save) if missing else []
        return [each for each in sealed if each.ticket.image in missing]

    def _counts(self, manifest: Manifest) -> bool:
        """Return whether latest pointers cover it, and the required remote, if any, has it."""
        save = self.request.save
        kinds = [kind for kind in SERVES_AS[save.kind] if manifest.serves(kind)]
        for kind in kinds:
            named = read_latest_pointer(save.root, kind)
            if not latest_pointer_covers(save.root, kind, save.run, save.step, named):
                return False
        return save.kind != "checkpoint" or is_replicated(save.root, manifest)

    def _describe_missed(self, status: SaveStatus) -> str:
        """Return what has not been reached, to follow "was not"."""
        if status == "not exported":
            return "exported, but is committed"
        if status == "not replicated":
            if remote := read_job_settings(self.request.root).required_remote:
                return f"brought to {remote}, and is committed in the root only"
            return "named by the latest pointers, but is committed"
        return "committed"

    def _is_gone(self) -> bool:
        """Return whether the committed step was removed or replaced since.

        Retention removes a step only if there is a newer one of its kind; a rewind or a later run
        may have replaced it as well.
        """
        save = self.request.save
        is_reduced = self.manifest and self.manifest.removed and save.kind == "checkpoint"
        if read_run_number(save.root, save.step) == save.run and not is_reduced:
            return False
        best = find_newest(save.root, save.kind)
        is_behind = best is not None and (best.run, best.step) > (save.run, save.step)
        return is_behind or is_superseded(save.root, save.run, save.step)


def _why_failed(images: Sequence[SealedImage]) -> str:
    """Return why images are not part of the commit; empty for none."""
    reasons = []
    for sealed in images:
        try:
            reasons.append(read_file(failure_path(sealed.slot)).decode())
        except OSError:
            reasons.append(f"{sealed.ticket.what} was evicted")
    return "; ".join(reasons)


def read_status(request: SaveRequest, told: Entry | None) -> tuple[SaveStatus, str]:
    """Return the status of a save, and why, by its root and what its journal tells.

    Raises:
        FormatError: another release has committed the step.
    """
    # what has completed was committed
    return decide(Facts(told=told, is_committed=request.is_committed, is_gone=True))


def compare_late_images(spool: JobSpool, request: SaveRequest) -> None:
    """Compare the remaining images of a completed save with its commit; drop its request.

    No other run will commit them: equal images are released, and others are marked as failed.
    """
    save = request.save
    try:
        remove_request(spool, save)
        for sealed in spool.read_save(save):
            resolve_late_image(save, sealed)
    except (OSError, TrinitySyncError) as error:
        warn_once(f"cannot compare the images of {save} with its commit: {error}")


def end_images(
    spool: JobSpool, request: SaveRequest, reason: str, *, limit_s: float = math.inf
) -> None:
    """Mark the images of a save that has failed, so that they are evicted first; drop its request.

    With a ``limit_s``, images that are marked, or held for so long by what persists them, stay. If
    the save is committed, and what follows has failed, they are compared with the commit.
    """
    with suppress(OSError, TrinitySyncError):
        if request.is_committed:
            return compare_late_images(spool, request)
    images = spool.read_save(request.save)  # first: it may be of another release
    remove_request(spool, request.save)
    for sealed in images:
        if limit_s == math.inf or not sealed.failed:
            try:
                mark_image_failed(sealed, reason, limit_s=limit_s)
            except LockTimeoutError:
                if limit_s == math.inf:
                    raise
