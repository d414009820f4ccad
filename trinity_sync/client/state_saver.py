"""Saves of states: what a process has staged and submitted, and what still overlaps.

A save is staged in the calling thread, or, overlapped, in one of its own while training goes on;
either way it is submitted the moment its last image is sealed.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, ImageError, TrinitySyncError
from trinity_sync.layout import Component, Kind
from trinity_sync.snapshot.stager import METADATA, Origin, Plan, Staged, Stager, pack_folder
from trinity_sync.snapshot.version_tag import Published

logger = logging.getLogger(__name__)

MODEL: Component = "model"
NOTHING_STAGED = Staged((), 0, 0.0, 0.0)


class StateSaver:
    """Stages and submits the states of one process.

    Args:
        stager: copies them.
        submit: called with the save and what was staged, once its images are sealed.
        check_overlap: compare what was staged while training went on with a digest of the state.
    """

    def __init__(
        self,
        stager: Stager,
        submit: Callable[[Origin, Staged], None],
        *,
        check_overlap: bool = False,
    ) -> None:
        self._stager = stager
        self._submit = submit
        self._check_overlap = check_overlap
        self._staged: dict[tuple[str, int], list[str]] = {}
        self._submitted: set[tuple[str, int, Kind]] = set()
        self._uploaded = False
        self._packed: dict[Path, bytes] = {}
        self._failures: list[str] = []
        self._background: ThreadPoolExecutor | None = None
        self._overlapping: Future[Staged] | None = None

    def save(
        self,
        origin: Origin,
        components: Mapping[str, Any],
        *,
        metadata: str | Path | None = None,
        attachments: bytes | None = None,
        overlap: bool = False,
    ) -> Staged:
        """Stage what was not staged at this step before, or has changed since, and submit it.

        What has changed is compared with the step when that is committed: this save fails then.

        Raises:
            ConfigError: components come after the save was submitted.
            SpoolError, ImageError: the very first save cannot be staged. A later one that cannot
                is among the failures, and training goes on.
        """
        self.wait_staged()
        role, step, kind = origin.role, origin.step, origin.kind
        earlier = [
            name
            for name in self._staged.get((role, step), [])
            if name not in components or self._is_staged(origin, name, components[name], overlap)
        ]
        states = {name: state for name, state in components.items() if name not in earlier}
        submitted = (role, step, kind) in self._submitted
        if not states and attachments is None:
            if submitted or kind == "state_dict":  # a checkpoint serves as the step's sync, too
                return NOTHING_STAGED
            states = dict(components)  # all of it went with the sync: the checkpoint has its own
        late = [name for name in states if name not in self._staged.get((role, step), [])]
        if submitted and (late or attachments is not None):
            raise ConfigError(
                f"step {step}, role {role}: {', '.join(late) or 'attachments'} comes after the "
                f"{kind} was submitted; submit all components of a step in one call"
            )
        packed = None
        try:
            if metadata is not None and origin.rank == 0 and METADATA not in earlier:
                packed = self._packed.get(Path(metadata)) or pack_folder(Path(metadata))
                self._packed = {Path(metadata): packed} if packed else {}
            plan = self._stager.plan(
                origin,
                states,
                also=earlier,
                metadata=packed,
                attachments=attachments,
                overlap=overlap,
                check=self._check_overlap,
            )
        except Exception as error:
            return self._failed(origin, error)
        if not overlap:
            return self._carry_out(plan)
        self._background = self._background or ThreadPoolExecutor(1, "overlapped-staging")
        self._overlapping = self._background.submit(self._carry_out, plan, threads=1)
        return Staged(plan.components, plan.nbytes, time.perf_counter() - plan.began, 0.0)

    def upload(self, origin: Origin, collect: Callable[[], Any]) -> tuple[Published | None, Staged]:
        """Stage the model, unless the step's save did, and let readers have it; save nothing.

        Returns:
            What readers may read, None where it could not be staged; and what staging cost.

        Raises:
            SpoolError, ImageError: as `save`. And whatever ``collect`` raises.
        """
        self.wait_staged()
        began = time.perf_counter()
        try:
            if published := self._stager.publish(origin, MODEL):
                return published, replace(NOTHING_STAGED, stall_s=time.perf_counter() - began)
        except Exception as error:
            return None, self._failed(origin, error)
        state = collect()
        try:
            plan = self._stager.plan(origin, {MODEL: state})
            staged = self._stager.carry_out(plan, sealed=False)
            published = self._stager.publish(origin, MODEL)
        except Exception as error:
            return None, self._failed(origin, error)
        self._uploaded = True
        return published, staged

    def wait_staged(self) -> float:
        """Wait for an overlapped save to be staged; returns the seconds that it took.

        Raises:
            SpoolError, ImageError: as `save`.
        """
        if self._overlapping is None:
            return 0.0
        start = time.perf_counter()
        overlapping, self._overlapping = self._overlapping, None
        overlapping.result()
        return time.perf_counter() - start

    def take_failures(self) -> list[str]:
        """Return what could not be staged since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Wait for the save that overlaps, and release the slots."""
        try:
            self.wait_staged()
        finally:
            if self._background:
                self._background.shutdown()
            self._stager.close()

    def _is_staged(self, origin: Origin, component: str, state: Any, overlap: bool) -> bool:
        """Whether a state has not changed since it was staged at this step, as far as is known."""
        with suppress(Exception):  # a state that cannot be read is staged, which says why it fails
            return self._stager.holds(origin, component, state, overlap=overlap)
        return False

    def _carry_out(self, plan: Plan, *, threads: int = 0) -> Staged:
        origin = plan.origin
        try:
            staged = self._stager.carry_out(plan, threads=threads)
        except Exception as error:
            return self._failed(origin, error)
        kept = {key: value for key, value in self._staged.items() if key[0] != origin.role}
        self._staged = {**kept, (origin.role, origin.step): list(staged.components)}
        self._submitted = {key for key in self._submitted if key[:2] in self._staged}
        self._submitted.add((origin.role, origin.step, origin.kind))
        self._submit(origin, staged)
        return staged

    def _failed(self, origin: Origin, error: Exception) -> Staged:
        if not isinstance(error, TrinitySyncError):  # of torch, of the system, of a state's object
            cause = error
            error = ImageError(
                f"step {origin.step}, role {origin.role}, rank {origin.rank}: nothing was "
                f"submitted, because staging failed with {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        if not (self._staged or self._uploaded):
            raise error
        self._failures.append(str(error))
        logger.error("Step %d is not saved, training goes on: %s", origin.step, error)
        return NOTHING_STAGED
