"""Submitted saves, their status, and what rank 0 shares of it with the other ranks.

The other ranks query no server: rank 0 writes what it learns into a log.

::

    root/.trinity_sync/outcomes/run3-1b4f0e98.5d41402a.jsonl
        {"key": "...step40/checkpoint", "state": "pending", "message": "", "url": ""}
        {"key": "...step40/checkpoint", "state": "failed", "message": "...", "url": "..."}

The rank 0 of each process group has a file of its own, and holds its lock while it follows saves. A
pending line says that rank 0 queries the server about a save, the next line how the save ended. The
lines save calls and decide nothing: they are not synced, a truncated line is ignored, and a rank
that finds no living rank 0 queries the server itself. The newest run removes the files of earlier
runs that no process holds.
"""

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import CommitError, ManifestError
from trinity_sync.fs.atomic import ReadOnChange, list_uncached, make_folder, make_temporary_path
from trinity_sync.fs.locks import LockFile, is_locked
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, SERVES_AS, parse_number
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.commit import resolve_late_image
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.export_requests import is_exported
from trinity_sync.storage.job_settings import is_replicated, read_required_remote
from trinity_sync.storage.latest_pointer import latest_pointer_covers
from trinity_sync.storage.manifest import Manifest, is_committed, read_manifest, read_run_number
from trinity_sync.storage.runs import find_superseding_run, list_runs
from trinity_sync.storage.save_functions import read_statuses
from trinity_sync.tensors.safe_load import open_no_follow

logger = logging.getLogger(__name__)

UNANNOUNCED_S = 360.0
"""Seconds within which rank 0 submits a save that another rank has submitted: it may wait for a
slot (``slot_wait_s``)."""
_REMEMBERED = 1024
"""Number of saves of each file whose outcome a reader keeps."""


State = Literal["unknown", "pending", "running", "completed", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What is known of the flow run of a save, or of the saver's work on it."""

    state: State
    message: str = ""
    url: str = ""


class _Line(msgspec.Struct, frozen=True):
    """Each other line."""

    key: str
    state: State
    message: str
    url: str


class OutcomeLog:
    """The file that this process, a rank 0, writes; ``request`` is any of the run's."""

    def __init__(self, request: SaveRequest) -> None:
        self._request = request
        self._path = Path()
        self._lock: LockFile | None = None

    def append(self, outcomes: Mapping[str, Outcome]) -> None:
        """Append outcomes by request key; on an error close the file, so that other ranks query."""
        lines = [
            msgspec.json.encode(_Line(key, each.state, each.message, each.url))
            for key, each in outcomes.items()
        ]
        try:
            if self._lock is None or not self._path.exists():  # it may have been removed
                self.close()
                self._begin()
            # other NFS clients see the content of a file once it is closed
            with self._path.open("ab") as file:
                file.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            logger.warning(
                "Cannot write the outcome of %s for the other ranks: %s. They query the Prefect "
                "server themselves",
                ", ".join(outcomes),
                error,
            )
            self.close()

    def close(self) -> None:
        """Release the lock: this process no longer follows saves."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _begin(self) -> None:
        folder = _folder(self._request.root)
        make_folder(folder)
        for path in folder.glob("run*.jsonl"):
            number = parse_number(path.name.removeprefix("run").partition("-")[0])
            with suppress(OSError):  # such as another user's file
                if number is not None and number < self._request.run and not is_locked(path):
                    path.unlink(missing_ok=True)
        self._path = folder / f"{self._request.save.run_label}.{uuid.uuid4().hex[:8]}.jsonl"
        # locked before it gets its name, so no rank finds it unlocked
        temporary = make_temporary_path(self._path)
        lock = LockFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            lock.acquire()
            temporary.rename(self._path)
        except BaseException:
            lock.close()
            temporary.unlink(missing_ok=True)
            raise
        self._lock = lock


@dataclass
class _File:
    """What a reader knows of one file."""

    offset: int = 0
    said: dict[str, Outcome] = field(default_factory=dict)
    """The newest line of each save."""


class OutcomeLogs:
    """The files of a run, as the other ranks read them; ``request`` is any of the run's."""

    def __init__(self, request: SaveRequest) -> None:
        self._folder = _folder(request.root)
        self._pattern = f"{request.save.run_label}.*.jsonl"
        self._files: dict[Path, _File] = {}

    def read(self) -> None:
        """Read what was added since the last call.

        Raises:
            OSError: the root cannot be read.
        """
        for path in list_uncached(self._folder, self._pattern):
            seen = self._files.setdefault(path, _File())
            try:
                with open_no_follow(path) as file:  # which asks an NFS server for its size
                    file.seek(seen.offset)
                    whole = file.read().rpartition(b"\n")[0]
            except OSError:
                continue  # such as removed by a later run
            if whole:
                self._take(seen, whole.split(b"\n"))
                seen.offset += len(whole) + 1

    def outcome(self, key: str) -> Outcome | None:
        """Return the outcome of a save by its request key; None if no rank 0 has written it."""
        said = [each.said[key] for each in self._files.values() if key in each.said]
        ended = [each for each in said if each.state in ("completed", "failed")]
        return ended[0] if ended else None

    def is_followed(self, key: str, age_s: float) -> bool:
        """Return whether a living rank 0 follows a save, or may still begin to.

        ``age_s`` is counted from when this process submitted the save.

        Raises:
            OSError: the root cannot be read.
        """
        announcing = [path for path, each in self._files.items() if key in each.said]
        if announcing:
            return any(map(is_locked, announcing))
        if age_s >= UNANNOUNCED_S:
            return False
        return not self._files or any(map(is_locked, self._files))

    @staticmethod
    def _take(seen: _File, lines: list[bytes]) -> None:
        for line in lines:
            try:
                read = msgspec.json.decode(line, type=_Line)
            except ValueError:
                continue  # truncated when its writer died
            seen.said.pop(read.key, None)
            seen.said[read.key] = Outcome(read.state, read.message, read.url)
            if len(seen.said) > _REMEMBERED:
                del seen.said[next(iter(seen.said))]


def _folder(root: str) -> Path:
    return Path(root) / PRIVATE_FOLDER / "outcomes"


COMPLETED = Outcome("completed")


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    outcome: Outcome
    """Outcome to write for the other ranks."""
    missed: str = ""
    """What was not reached, to follow "was not"; empty for a save that succeeded."""
    failure: str = ""
    """Why it was not reached."""


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
    requested_here: bool = False
    """Whether this process has requested the flow run."""
    announced: bool = False
    """Whether rank 0 has written for the other ranks that it follows the save."""
    committed: bool = False
    """Whether the last `find_result` has found it committed."""
    manifest: Manifest | None = None
    """What this run has committed of the step, as of the last look."""
    troubled: bool = False
    """Whether it was logged already that its status cannot be read."""

    def __post_init__(self) -> None:
        self._manifest_file = ReadOnChange(self.request.save.folder / MANIFEST, self._read_manifest)

    def find_result(self, outcome: Outcome | None, spool: JobSpool) -> SaveResult | None:
        """Return how the save ended; None if it has not.

        Without an ``outcome`` the server was not queried. Images that wait although the flow run
        has completed are compared with the commit. A worker of this node does the same, but a node
        need not have a worker.

        Raises:
            OSError, TrinitySyncError: the root or the spool cannot be read.
        """
        if self._has_succeeded():
            return SaveResult(COMPLETED)
        if outcome is None or outcome.state not in ("completed", "failed"):
            return None
        why = outcome.message
        missed = "exported, but is committed" if self.committed else self._describe_missed()
        if outcome.state == "completed":
            late = self._find_late_images(spool)
            if not late and self._has_succeeded():  # an image has just joined the commit
                return SaveResult(COMPLETED)
            if not late and not self._has_late_functions(spool) and self._is_gone():
                logger.info(
                    "%s of %s was committed, and has been removed or replaced since",
                    self.request.run_name,
                    self.request.root,
                )
                return SaveResult(COMPLETED)
            unresolved = [image for image in late if not image.failed]
            for image in unresolved:
                resolve_late_image(self.request.save, image)
            if unresolved:
                return None  # the next look finds the result
            why = _why_failed(late) or f"it completed without that step being {missed}"
        where = f" ({outcome.url})" if outcome.url else ""
        return SaveResult(outcome, missed, f"{why}{where}")

    def _has_succeeded(self) -> bool:
        self.committed = self._is_committed()
        return self.committed and all(is_exported(self.manifest, role) for role in self.exports)

    def _find_late_images(self, spool: JobSpool) -> list[SealedImage]:
        """Return this process's images that wait in the spool and are not part of the commit.

        Images that are part of it are freed, also where the step has been removed since.
        """
        missing = self.images - (self.manifest.images if self.manifest else frozenset())
        sealed = spool.read_step(self.request.run, self.request.step)[0] if missing else []
        return [each for each in sealed if each.ticket.image in missing]

    def _has_late_functions(self, spool: JobSpool) -> bool:
        """Return whether save functions have run since the commit, which removes their statuses."""
        save = self.request.save
        return any(read_statuses(spool, save.run, save.step, save.kind))

    def _read_manifest(self) -> Manifest | None:
        """Return what this run has committed of the step, with this rank's files at least.

        Raises:
            OSError: the root cannot be read.
        """
        save = self.request.save
        # the files of exports are rank 0's
        ranks = {self.rank, 0} if self.exports else {self.rank}
        with suppress(ManifestError):
            manifest = read_manifest(save.root, save.step, ranks=ranks)
            return manifest if manifest and manifest.run == save.run else None
        return None

    def _is_committed(self) -> bool:
        """Return whether this process's images are committed, and the step counts.

        It counts once the latest pointers cover it and it is in the required remote, if any.
        """
        save = self.request.save
        roles = save.roles if self.request.components else ()  # save functions have none
        manifest = self.manifest = self._manifest_file.get()
        if not (
            manifest and manifest.has_kind(save.kind, roles) and self.images <= manifest.images
        ):
            return False
        kinds = {*SERVES_AS[save.kind]} & {*manifest.kinds}
        if not all(latest_pointer_covers(save.root, kind, save.run, save.step) for kind in kinds):
            return False
        try:
            is_checkpoint = save.kind == "checkpoint"
            return not (is_checkpoint and read_required_remote(save.root)) or is_replicated(
                save.root, manifest
            )
        except CommitError:  # the record of the remote is torn, so the flow run's end decides
            return False

    def _describe_missed(self) -> str:
        """Return what has not been reached, to follow "was not"."""
        save = self.request.save
        if is_committed(save.root, save.run, save.step, save.kind):
            with suppress(CommitError):
                if remote := read_required_remote(save.root):
                    return f"brought to {remote}, and is committed in the root only"
        return "committed"

    def _is_gone(self) -> bool:
        """Return whether the committed step was removed or replaced since.

        Retention removes a step only if there is a newer one of its kind; a rewind or a later run
        may have replaced it as well.
        """
        save = self.request.save
        if read_run_number(save.root, save.step) == save.run:
            return False
        best = find_newest(save.root, save.kind)
        if best is not None and (best.run, best.step) > (save.run, save.step):
            return True
        return find_superseding_run(list_runs(save.root), save.run, save.step) is not None


def _why_failed(images: Sequence[SealedImage]) -> str:
    """Return why images are not part of the commit; empty for none."""
    reasons = []
    for sealed in images:
        try:
            reasons.append(failure_path(sealed.slot).read_text())
        except OSError:
            reasons.append(f"{sealed.ticket.what} was evicted")
    return "; ".join(reasons)
