"""Save and publish the states of a process.

A save is staged in the calling thread or, overlapped, in a thread of its own while training
continues.

What a trainer uploads is looked at in a thread of its own: what the job's ``on_nonfinite`` refuses,
and so each reader does, is a failure.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trinity_sync.errors import (
    ConfigError,
    ImageError,
    SaveTimeoutError,
    TrinitySyncError,
    WeightSyncError,
    describe_error,
)
from trinity_sync.fs.process import call_held_handlers, hold_handlers
from trinity_sync.layout import FOLDERS, SERVES_AS, Component, Kind, check_type, is_shard_file
from trinity_sync.snapshot.identity import Origin
from trinity_sync.snapshot.image import LaidOut
from trinity_sync.snapshot.packed import Packed, pack, read_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.stager import METADATA, Staged, StagePlan, Stager
from trinity_sync.snapshot.ticket import VersionTag, lock_slot, read_version_tag
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import is_own_file

logger = logging.getLogger(__name__)

MODEL: Component = "model"
DcpFolders = tuple[Mapping[str, LaidOut], Mapping[str, bytes]]
"""A rank's files by component, and small files of rank 0 by path below the role's folder."""
Metadata = Path | dict[str, bytes | Path]
"""Small files by path, or a folder of them."""
NOTHING_STAGED = Staged((), 0, 0.0, 0.0)
HELD_S = 0.1
"""Seconds for which a wait for an overlapped copy holds back handlers of signals."""


@dataclass
class _NewestStep:
    """The last step of a role that was staged to be saved."""

    step: int
    components: tuple[str, ...] = ()
    submitted: dict[Kind, Origin] = field(default_factory=dict)
    metadata: Metadata | None = None
    """As it was given last and saved."""


@dataclass
class _Due:
    """What of a save is to be staged, if its step was staged before."""

    states: Mapping[str, Any]
    """To stage, by component."""
    earlier: Sequence[str] = ()
    """Components that are part of the save, and staged already."""
    late: Sequence[str] = ()
    """Components and options that no save of the step had."""
    again: bool = False
    """Whether the save has failed, and is submitted as a whole."""
    is_pending: bool = False
    """Whether the save was submitted, and has not failed."""
    is_served: bool = False
    """Whether a save that was submitted has all of it, but for attachments."""


@dataclass
class StateSaver:
    """Stages and submits the states of one process."""

    stager: Stager
    submit: Callable[[Origin, Staged], None]
    """Called with the origin of the images and what was staged, once they are sealed."""
    has_failed: Callable[[str], bool] = lambda _: False
    """Return whether a save that was submitted has failed since, by request key."""
    prepare: Callable[[str], object] = lambda _: None
    """Starts what commits the first save, of this role, once it is copied: it takes a core."""
    check_overlap: bool = field(default=False, kw_only=True)
    """Whether to compare overlapped images with a digest taken at the call."""
    has_saved: bool = field(default=False, init=False)
    """Whether this process has saved: since then only errors of arguments are raised."""
    lacking: dict[tuple[int, Kind, str], str] = field(default_factory=dict, init=False)
    """Why a save lacks a part of it, by step, kind and name of the part."""

    def __post_init__(self) -> None:
        self._newest: dict[str, _NewestStep] = {}
        """By role, the last step that was staged to be saved."""
        self._uploaded: dict[str, int] = {}
        """Newest step that was published, by role."""
        self._packed: tuple[Metadata | None, Packed | None] = None, None
        """Metadata of the save before, and the same packed."""
        self._failures: list[str] = []
        self._background: ThreadPoolExecutor | None = None
        self._overlapping: Future[Staged] | None = None

    def save(
        self,
        origin: Origin,
        components: Mapping[str, Any],
        *,
        metadata: str | Path | Mapping[str, bytes | Path] | None = None,
        attachments: Packed | None = None,
        overlap: bool = False,
        began: float | None = None,
    ) -> Staged:
        """Stage the components that are new at this step or have changed, and submit the save.

        Return what was staged, or will be with ``overlap``, which copies large tensors in a thread
        while training continues. The commit compares changed components with what was staged
        before, and fails this save. A save that has failed is submitted again as a whole; images
        that are still there and equal are not copied again.

        ``metadata``, small files or their folder, is ignored on other ranks than 0, and if it
        differs from that of the step's first save, with a warning. ``attachments`` are packed;
        those of a save that was submitted are part of it already. The stall is counted from
        ``began`` (`time.perf_counter`), by default from now.

        Raises:
            ConfigError: components, an export or ``keep`` come after the save was submitted.
            SpoolError, ImageError: the first save of the process cannot be staged. The error of a
                later save is one of `take_failures`, and training continues.
        """
        self.wait_staged()
        # comparing earlier images stalls the caller as well
        began = time.perf_counter() if began is None else began
        given: Metadata | None = None
        if metadata is not None and origin.rank == 0:
            given = dict(metadata) if isinstance(metadata, Mapping) else Path(metadata)
        due = _Due(components)
        newest = self._newest.get(origin.role)
        if newest is not None and newest.step == origin.step:
            due = self._find_due(origin, components, newest)
            if due.is_pending:
                attachments = None
            is_served = due.is_served and attachments is None
            if given and given != newest.metadata and (is_served or METADATA in due.earlier):
                logger.warning(  # an error would be one of rank 0 alone
                    "Step %d, role %s: its metadata is that of the first save of the step. Other "
                    "metadata is not saved; pass it with that save",
                    origin.step,
                    origin.role,
                )
                given = newest.metadata
            if is_served:
                return NOTHING_STAGED
            if due.is_pending and due.late:
                raise ConfigError(
                    f"step {origin.step}, role {origin.role}: {', '.join(due.late)} comes after "
                    f"the {origin.kind} was submitted; submit all of a step in one call"
                )
        # if all went with another save, this one needs its own images
        states = due.states if due.states or attachments else components
        packed = None
        try:
            if given is not None and METADATA not in due.earlier:
                packed = self._pack(given)
            plan = self.stager.lay_out(
                origin,
                states,
                also=due.earlier,
                metadata=packed,
                attachments=attachments,
                overlap=overlap,
                check=self.check_overlap,
                again=due.again,
                began=began,
            )
        except Exception as error:
            return self.fail(origin, error)
        if overlap:
            return self._copy_in_background(plan, given, began)
        return self._copy_and_submit(plan, given)

    def upload(
        self, origin: Origin, collect: Callable[[], Any]
    ) -> tuple[VersionTag | None, Staged]:
        """Stage the model, unless the step's save did, and publish it to readers; save nothing.

        Return the tag of the published version, None if it could not be staged, and what staging
        cost. ``collect`` returns the model's state. It is called only if the model has to be
        staged, or compared with an earlier upload of the step.

        Raises:
            ConfigError: a later step was uploaded before, or this one with other weights, so that
                readers would keep what they have; or base layers come without their adapter.
            SpoolError, ImageError: as in `save`; also any error of ``collect``.
        """
        self.wait_staged()
        began = time.perf_counter()
        newest = self._uploaded.get(origin.role, -1)
        if origin.step < newest:
            raise ConfigError(
                f"step {origin.step}, role {origin.role}: it is uploaded after step {newest}, "
                "which readers keep; versions of a run never go back. Pass a later step, or start "
                "a new run to publish earlier weights"
            )
        state = collect() if origin.step == newest else None
        with hold_handlers():  # whose errors are the caller's
            try:
                published = self._publish(origin)
                is_other = state is not None and not self.stager.holds(
                    origin, MODEL, state, on_device=True
                )
            except Exception as error:
                return None, self.fail(origin, error)
        if published and is_other:
            raise ConfigError(
                f"step {origin.step}, role {origin.role}, rank {origin.rank}: it is uploaded again "
                "with other weights, and readers keep the first; pass a later step with changed "
                "weights"
            )
        if published:
            return published, replace(NOTHING_STAGED, stall_s=time.perf_counter() - began)
        state = collect() if state is None else state
        if not isinstance(state, Mapping) or isinstance(state.get(MODEL), Mapping | nn.Module):
            what = f"step {origin.step}: what is uploaded"
            check_type(what, state, (), "model.state_dict(), without other components")
        if origin.role not in self._uploaded and isinstance(state, Mapping):
            _require_adapted(origin, [*map(str, state)])
        with hold_handlers():
            try:
                staged = self.stager.stage(origin, {MODEL: state}, seals=False)
                return self._publish(origin), staged
            except Exception as error:
                return None, self.fail(origin, error)

    def find_serving(self, origin: Origin) -> Origin:
        """Return the origin of the save that serves one of which nothing had to be staged."""
        newest = self._newest.get(origin.role)
        submitted = newest.submitted if newest and newest.step == origin.step else {}
        serving = [each for kind, each in submitted.items() if origin.kind in SERVES_AS[kind]]
        return min(serving, key=lambda each: self.has_failed(each.key), default=origin)

    def list_due(self, step: int, role: str) -> list[str]:
        """Return the other roles that this process saves, and has not saved at this step yet."""
        return [name for name, each in self._newest.items() if name != role and each.step < step]

    def wait_staged(self) -> float:
        """Wait until an overlapped save is submitted; return the seconds that it took.

        Its tickets count the wait as a stall.

        Raises:
            SpoolError, ImageError: as in `save`.
        """
        overlapping = self._overlapping
        if overlapping is None:
            return 0.0
        start = time.perf_counter()
        with hold_handlers():
            if not overlapping.done():
                self.stager.waiting_since = start
                while wait([overlapping], HELD_S).not_done:
                    call_held_handlers()
            if self._overlapping is overlapping:  # another thread may have waited as well
                self._overlapping = None
                overlapping.result()
        return time.perf_counter() - start

    def take_failures(self) -> list[str]:
        """Return the errors of saves that could not be staged since the last call."""
        failures, self._failures = self._failures, []
        return [*dict.fromkeys(failures)]

    def fail(self, origin: Origin, error: Exception) -> Staged:
        """Log that a save cannot be staged, and have `take_failures` return why.

        Raises:
            SpoolError, ImageError: as in `save`, for the first save of the process.
        """
        if not isinstance(error, TrinitySyncError):  # of torch, the system or a user's object
            cause = error
            error = ImageError(
                f"step {origin.step}, role {origin.role}, rank {origin.rank}: nothing was "
                f"submitted, because staging failed with {describe_error(cause)}"
            )
            error.__cause__ = cause
        if not self.has_saved:
            raise error
        told = f"step {origin.step}, role {origin.role}"
        return self._tell(str(error) if told in str(error) else f"{told}: {error}")

    def _tell(self, failure: str) -> Staged:
        self._failures.append(failure)
        logger.error("A save has failed, training continues: %s", failure)
        return replace(NOTHING_STAGED, failure=failure)

    @contextmanager
    def defer_errors(self, step: int, kind: Kind, part: str = "") -> Iterator[None]:
        """Do as `fail` with an error of the block, in which no argument is checked.

        With a ``part``, saves of the step fail with the error until a block for it succeeds.
        """
        self.lacking = {k: why for k, why in self.lacking.items() if k[0] >= step}
        self.lacking.pop((step, kind, part), None)
        try:
            yield
        except (OSError, RuntimeError, TrinitySyncError) as error:
            if not self.has_saved:
                raise
            of_step = str(error).startswith(f"step {step}")
            failure = str(error) if of_step else f"step {step}, {part or kind}: {error}"
            self._tell(failure)
            if part:
                self.lacking[step, kind, part] = failure

    def fail_without_parts(self, step: int, kind: Kind) -> Staged | None:
        """Do as `fail` for a save that lacks a part; return None if it lacks none."""
        why = [why for key, why in self.lacking.items() if key[:2] == (step, kind)]
        return self._tell("; ".join(why)) if why else None

    def close(self) -> None:
        """Wait for an overlapped save, and release the slots."""
        try:
            self.wait_staged()
        finally:
            with hold_handlers():  # which may save
                if self._background:
                    self._background.shutdown()
                self.stager.close()

    def _pack(self, given: Metadata) -> Packed | None:
        before, packed = self._packed
        if packed is None or packed.files or before != given:
            files = read_folder(given) if isinstance(given, Path) else given
            for name in files:
                if is_shard_file(name) or is_own_file(f"role/{name}"):
                    raise ConfigError(
                        f"metadata {name!r} cannot be saved: it is a name that trinity_sync uses "
                        "itself; save that file under another name"
                    )
            packed = pack(files) if files else None
            self._packed = given, packed
        return packed

    def _publish(self, origin: Origin) -> VersionTag | None:
        published = self.stager.publish(origin, MODEL)
        if published:
            self._uploaded[origin.role] = origin.step
            self.has_saved = True
        return published

    def _find_due(self, origin: Origin, components: Mapping[str, Any], newest: _NewestStep) -> _Due:
        """Compare a save with what was staged and submitted of its step before."""
        kind, known, last = origin.kind, newest.components, newest.submitted.get(origin.kind)
        again = last is not None and last.attempt < origin.attempt
        pending = {
            each
            for each, submitted in newest.submitted.items()
            if not (again if each == kind else self.has_failed(submitted.key))
        }
        # another rank has saved these for this one
        serving = [newest.submitted[each] for each in pending if kind in SERVES_AS[each]]
        covered = {name for each in serving for name in {*each.replicated, *each.replicas}}
        own = {n: state for n, state in components.items() if n in known or n not in covered}
        # a sync has no components of the checkpoint, and what failed is staged again
        others = (name for name in known if name not in own and kind == "checkpoint")
        earlier = [name for name in others if not (again and name in FOLDERS)]
        earlier += [
            name
            for name, state in own.items()
            if not again and name in known and self._is_staged(origin, name, state)
        ]
        states = {name: state for name, state in own.items() if name not in earlier}
        late = [name for name in states if name not in known]
        for option in ("export", "keep"):
            value = getattr(origin, option)
            if value and any(getattr(each, option) != value for each in serving):
                late.append(option)
        is_served = bool(serving) and not (states or late)
        return _Due(states, earlier, late, again, kind in pending, is_served)

    def _is_staged(self, origin: Origin, component: str, state: Any) -> bool:
        """Return whether a state is staged at this step and has not changed since."""
        with suppress(Exception):  # staging a state that cannot be read raises why
            return self.stager.holds(origin, component, state)
        return False

    def _copy_in_background(
        self, plan: StagePlan, metadata: Metadata | None, began: float
    ) -> Staged:
        self._background = self._background or ThreadPoolExecutor(1, "overlapped-staging")
        try:
            submitted = self._background.submit(self._copy_and_submit, plan, metadata)
        except RuntimeError:  # after `close`, while Python ends, or no thread can be started
            self._background = None  # which may have queued it
            return self._copy_and_submit(plan, metadata)
        self._overlapping = submitted
        stall_s = time.perf_counter() - began
        return Staged(plan.components, plan.nbytes, stall_s, 0.0, submitted=submitted)

    def _copy_and_submit(self, plan: StagePlan, metadata: Metadata | None) -> Staged:
        """Copy and seal what was laid out, and submit the save."""
        origin = plan.origin
        try:
            if not self.has_saved:
                plan.before_seal = partial(self.prepare, origin.role)
            staged = self.stager.copy(plan)
        except Exception as error:
            return self.fail(origin, error)
        newest = self._newest.get(origin.role)
        if newest is None or newest.step != origin.step:
            newest = self._newest[origin.role] = _NewestStep(origin.step)
        newest.components = staged.components
        newest.metadata = metadata or newest.metadata
        newest.submitted[origin.kind] = origin
        self.has_saved = True
        self.submit(origin, staged)
        return staged


def _require_adapted(origin: Origin, names: list[str]) -> None:
    """Refuse base layers of adapters without these, with which alone no policy computes."""
    base = next((name for name in names if ".base_layer." in name), "")
    layer = base.partition("base_layer.")[0]
    if base and not any(n.startswith(layer) and ".base_layer." not in n for n in names):
        raise ConfigError(
            f"step {origin.step}, role {origin.role}: {base} is published without the adapter of "
            "its layer, so readers would get the untrained model. Merge it (in veRL "
            "actor_rollout_ref.model.lora.merge=True), or publish the adapter alone"
        )


class UploadCheck:
    """Looks at the uploads of one process, in their order."""

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root, self._spool = root, spool
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def start(self, tag: VersionTag) -> None:
        """Look at the version with this tag; returns at once."""
        thread = threading.Thread(
            target=self._run, args=(tag, self._thread), name="uploads", daemon=True
        )
        with hold_handlers(), suppress(RuntimeError):  # no thread can be started
            thread.start()
            self._thread = thread

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until all is looked at, or a deadline (monotonic); return and drop the failures."""
        if self._thread:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise SaveTimeoutError("uploads are still read; call wait_all again to wait longer")
        failures, self._failures = self._failures, []
        return failures

    def _run(self, tag: VersionTag, previous: threading.Thread | None) -> None:
        if previous:
            previous.join()
        try:
            if read_job_settings(self._root).on_nonfinite == "refuse":
                self._require_finite(tag)
        except WeightSyncError as error:
            self._failures.append(str(error))
            logger.error("Readers refuse what is published: %s", error)
        except Exception as error:  # the root or the spool is gone
            logger.warning("step %d of %s is not looked at: %s", tag.step, self._root, error)

    def _require_finite(self, tag: VersionTag) -> None:
        # of readers, for this alone
        from trinity_sync.weights.version_view import require_finite
        from trinity_sync.weights.versions import make_shard

        found = self._spool.list_versions(tag.role)
        for slot in [slot for slot, each in found if each == tag]:
            with lock_slot(slot) as content:
                if read_version_tag(slot) == tag:
                    require_finite(make_shard(tag, slot, self._root, ""), [content[: tag.nbytes]])
