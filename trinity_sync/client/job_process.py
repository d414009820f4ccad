"""One process of a job: which run it takes part in, how a step is asked for, what became of it.

What is saved, and how, is for those who derive from it: `trinity_calls` and `coordinator`.
"""

import logging
import os
import signal
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trinity_sync.client.attachments import Attachments
from trinity_sync.client.callable_saver import FunctionSaves
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.init_root import folder_of, open_root
from trinity_sync.client.preemption import Preemption, noticed_by_any
from trinity_sync.client.run_context import OwnRun
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.client.state_saver import StateSaves
from trinity_sync.errors import ConfigError, PrefectApiError, SaveFailedError
from trinity_sync.layout import (
    COMPONENTS,
    Component,
    Kind,
    check_name,
    check_number,
    step_folder,
)
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Origin, Staged, Stager
from trinity_sync.snapshot.ticket import Export
from trinity_sync.storage.discovery import newest
from trinity_sync.storage.metrics import MetricsLog
from trinity_sync.storage.placement import Place, note_placement, places_of
from trinity_sync.storage.runs import Run

logger = logging.getLogger(__name__)


class JobProcess:
    """See the module, and `CheckpointCoordinator` for the arguments."""

    def __init__(
        self,
        root: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        places: Sequence[Place] = (),
        run_key: str | None = None,
        roles: Sequence[str] | None = None,
        settings: Settings | None = None,
        trigger: SaveTrigger | None = None,
        require_stack: bool = False,
    ) -> None:
        self._process = os.getpid()
        rank, world_size = check_number("rank", rank), check_number("world size", world_size)
        if not rank < world_size:
            raise ConfigError(f"rank {rank} is not below the world size {world_size}")
        self.settings = settings or Settings()
        self._trigger = trigger or SaveTrigger(self.settings)
        opens = rank == 0 and not places
        if opens and require_stack:
            self._trigger.require_stack()
        self.root = open_root(root, self.settings) if opens else folder_of(root)
        self.rank, self.world_size = rank, world_size
        self.roles = tuple(check_name("role", role) for role in roles or self.settings.roles)
        self.spool: JobSpool = open_job_spool(self.settings.spool, self.root)
        here = (self.settings.node, str(self.spool.folder.absolute()))
        self._places = tuple(places) or places_of([here] * world_size)
        self._placed: set[str] = set()
        """Roles that this run has in the root, see `_place`."""
        self._stager = Stager(
            self.spool, slots=self.settings.slots, slot_wait_s=self.settings.slot_wait_s
        )
        self._states = StateSaves(
            self._stager, self._ask_for, check_overlap=self.settings.check_overlap
        )
        self._attachments = Attachments(self.root, self.rank)
        if rank == 0 and trigger is None and not require_stack:
            self._warn_without_stack()
        self._watcher = CommitWatcher(self._trigger, self.spool, rank=rank, world_size=world_size)
        self._run = OwnRun(self.root, run_key or own_run_key())
        self._functions = FunctionSaves(self.root, self.spool)
        self._metrics = MetricsLog(self.root)
        self._monitored: set[tuple[int, Kind]] = set()
        """Saves of the newest step for which `register_and_monitor` has asked for the flow run."""
        self._failures: list[str] = []
        self._preemption = Preemption()

    def resumed_from(self, step: int) -> None:
        """Begin this run at ``step``; saves of earlier runs beyond it, not committed yet, lapse.

        Raises:
            ConfigError: as `check_resume`.
        """
        step = check_number("step", step)
        self.wait_staged()
        self._run.begin_at(step)

    def check_resume(self, step: int) -> None:
        """See that this run can begin at ``step``, before the step is loaded; `load` does it, too.

        Raises:
            ConfigError: this run has begun already, at another step; or its key is that of a run
                that is not new.
        """
        step = check_number("step", step)
        self.wait_staged()  # what is loaded next must not reach an image
        self._run.require_can_begin_at(step)

    def latest(self, kind: Kind = "checkpoint", *, settle_s: float = 0.0) -> Path | None:
        """Return the folder of the newest committed step, or None; see `latest_step`."""
        step = self.latest_step(kind, settle_s=settle_s)
        return None if step is None else step_folder(self.root, step)

    def latest_step(self, kind: Kind = "checkpoint", *, settle_s: float = 0.0) -> int | None:
        """Return the number of the newest committed step of ``kind``, or None if there is none.

        Args:
            kind: what is needed of the step.
            settle_s: seconds to wait first for saves that an earlier run handed over on this node
                and that are still on their way: resuming from an older step would abandon them.
                Where ranks are on several nodes, let one of them ask and tell the others.
        """
        deadline = time.monotonic() + settle_s
        while time.monotonic() < deadline:
            if all(sealed.failed for sealed in self.spool.tickets()[0]):
                break
            time.sleep(0.05)
        manifest = newest(self.root, kind)
        return manifest.step if manifest else None

    def wait_staged(self) -> float:
        """Wait until an overlapped save is staged; from then on the state may change.

        Returns:
            Seconds that the caller stood still.

        Raises:
            SpoolFullError, ImageError: as `save`; an image is torn if the state changed too early.
            ConfigError: this is not the process that made the coordinator.
        """
        self._require_own_process()
        return self._states.wait_staged()

    def on_preemption(self, signum: int = signal.SIGTERM, *, grace_s: float = 30.0) -> None:
        """Take ``signum`` as the notice that this process ends soon, instead of ending at it.

        The handler only notes the time; ask `preempted` between two steps. In processes that this
        one forks (a DataLoader's workers) the signal does what it did before.

        Args:
            signum: what the scheduler sends: SIGTERM in Kubernetes, that of ``--signal`` in Slurm.
            grace_s: seconds from the signal until the process is killed.

        Raises:
            ConfigError: this is not the main thread, or the signal cannot be caught; or this is not
                the process that made the coordinator.
        """
        self._require_own_process()
        self._preemption.notice(signum, grace_s)

    @property
    def preempted(self) -> bool:
        """Whether this process was told to end; ranks are told at different times."""
        return self._preemption.noticed

    def any_preempted(self) -> bool:
        """Whether any rank of the default process group was; all ask after the same step."""
        return noticed_by_any(self.preempted)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until all that this process handed over is committed, or has failed.

        Args:
            timeout: seconds; without end by default, also while the Prefect server is away.

        Raises:
            SaveFailedError: a save was not committed; the message says which, why and where to
                look. Each failure is raised once.
            SaveTimeoutError: the time is over, or this was closed; the saves may still commit.
            ConfigError: this is not the process that made the coordinator.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait_staged()
        self._failures += self._states.take_failures()
        self._failures += self._functions.wait(deadline)  # kept, should the next line time out
        failures = [*self._watcher.wait(deadline), *self._failures]
        self._failures = []
        if failures:
            raise SaveFailedError("\n".join(failures))

    @property
    def commit_seconds(self) -> Mapping[str, float]:
        """Seconds from hand-over to commit, by request key, of this process's committed saves.

        Ranks other than 0 learn of commits in `wait_all`, and take the time from the manifest: by
        the clock of the node that committed, against their own.
        """
        return self._watcher.commit_seconds

    def close(self, timeout: float = 10.0) -> None:
        """Let go of everything; what was handed over goes on without this process.

        Signals that `on_preemption` took end the process again, or do what they did before.
        In a forked child it does nothing: all of it is the parent's.

        Args:
            timeout: seconds to get requests out that Prefect has not taken yet. After that the
                worker of this node finds their images by itself.
        """
        if not self._is_own:
            return
        try:
            self._states.close()
        finally:
            self._metrics.close()
            self._watcher.close(timeout)
            self._preemption.forget()
        self.spool.remove_if_unused()

    @property
    def _is_own(self) -> bool:
        """Whether this process made the coordinator, and did not get it from one that forked it."""
        return self._process == os.getpid()

    def _require_own_process(self) -> None:
        if not self._is_own:
            raise ConfigError(
                f"rank {self.rank} of {self.root}: this coordinator was made by process "
                f"{self._process}, and this is process {os.getpid()}, which was forked from it; "
                "its slots, threads and saves stay there. Call it in that process, or make a "
                "coordinator of its own here, with another root."
            )

    def _warn_without_stack(self) -> None:
        try:
            self._trigger.find_stack()
        except PrefectApiError as error:
            logger.warning(
                "%s. Until then saves of %s wait in %s and are not committed",
                error,
                self.root,
                self.spool.folder,
            )

    def _origin(
        self, step: int, role: str, kind: Kind, *, keep: int = 0, export: Export = ""
    ) -> Origin:
        self._require_own_process()
        run = self._run.begun()
        return Origin(
            root=str(self.root),
            run=run.number,
            run_key=run.key,
            step=step,
            kind=kind,
            role=check_name("role", role),
            roles=self.roles if kind == "checkpoint" else (role,),
            rank=self.rank,
            world_size=self.world_size,
            keep=keep,
            export=export,
            strategy=self.settings.save_strategy,
        )

    def _place(self, role: str) -> None:
        """Write down on which nodes the ranks of a role are, once a run, before it saves."""
        if role not in self._placed:
            run = self._run.begun()
            note_placement(self.root, run.number, run.key, role, self._places)
            self._placed.add(role)

    def _ask_for(self, origin: Origin, staged: Staged) -> None:
        components: Sequence[str] = staged.components
        if origin.kind == "checkpoint":
            self._attachments.handed_over(origin.step)
        if len(origin.roles) > 1:  # whose request comes first counts, and others may have more
            components = COMPONENTS
        run = self._run.begun()
        request = self._request(
            run, origin.step, origin.kind, origin.roles, components, origin.keep
        )
        self._hand_over(request, images=staged.images, exports=origin.role if origin.export else "")

    def _request(
        self,
        run: Run,
        step: int,
        kind: Kind,
        roles: Sequence[str],
        components: Sequence[str],
        keep: int,
        expected: int = 0,
    ) -> SaveRequest:
        known: list[Component] = [name for name in COMPONENTS if name in components]
        return SaveRequest(
            root=str(self.root),
            step=step,
            run=run.number,
            run_key=run.key,
            kind=kind,
            roles=tuple(roles),
            components=tuple(known),
            expected=expected,
            keep=keep,
        )

    def _hand_over(
        self,
        request: SaveRequest,
        *,
        images: Collection[str] = (),
        always: bool = False,
        exports: str = "",
    ) -> None:
        submit = self.rank == 0 or always
        self._watcher.follow(request, images=images, exports=exports, submit=submit)


def own_run_key() -> str:
    """What all processes of a run have in common: ``TRINITY_SYNC_RUN``, else one of our own."""
    return os.environ.get("TRINITY_SYNC_RUN") or uuid.uuid4().hex
