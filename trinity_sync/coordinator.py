"""The trainer's front door: hand a step over, go on training, hear of every failure.

Trinity's name and methods (``save_async``, ``save_sync``, ``wait_all``, ``register_and_monitor``)
with Prefect in the place of its CheckpointMonitor, and `CheckpointCoordinator.save` for states,
which costs the caller one copy into shared memory and nothing else.
"""

import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from trinity_sync.attachments import Attachments
from trinity_sync.beginning import OwnRun
from trinity_sync.errors import ConfigError, SaveFailed
from trinity_sync.functions import FunctionSaves
from trinity_sync.layout import (
    COMPONENTS,
    FOLDERS,
    KINDS,
    Component,
    Kind,
    check_name,
    step_folder,
)
from trinity_sync.opening import folder_of, open_root, open_together
from trinity_sync.orchestration.trigger import SaveTrigger
from trinity_sync.orchestration.watch import SaveWatch
from trinity_sync.preemption import LastWords, Preemption, say_last_words
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.published import Published
from trinity_sync.snapshot.receipt import Receipt, process_name
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Origin, Staged, Stager
from trinity_sync.snapshot.ticket import Export, components_of
from trinity_sync.states import StateSaves
from trinity_sync.storage.claims import LONG_LEASE_S, take_lease
from trinity_sync.storage.manifest import is_committed
from trinity_sync.storage.metrics import MetricsLog
from trinity_sync.storage.placement import Place, note_placement, placement, places_of
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import Run
from trinity_sync.storage.steps import newest

logger = logging.getLogger(__name__)


class CheckpointCoordinator:
    """Saves of one process of a job; each rank has one, rank 0 asks Prefect for the flow runs.

    Args:
        root: the job's folder (Trinity's ``checkpoint_job_dir``); steps go to
            ``root/global_step_{N}/{role}/``. Made if it is missing.
        rank: rank of this process.
        world_size: ranks that save together.
        places: on which nodes the ranks are; all of them on this one by default. Whoever gives
            them has opened the root, as `of_process_group` does.
        run_key: what all processes of this run have in common and no other run of the job has.
            By default ``TRINITY_SYNC_RUN``, else one of this coordinator's own. Roles that save
            from separate process groups need it.
        roles: roles that make one checkpoint together; from the settings by default.
        settings: from the environment by default.
        trigger: from the settings by default.

    Raises:
        ConfigError: an argument cannot work.
        RootError: the file system of the root lacks what a commit needs.
        SpoolError: the spool folder cannot be used.

    Example::

        with CheckpointCoordinator("ckpts") as saves:
            for step in range(1, 1001):
                train_one_step()
                if step % 10 == 0:
                    saves.save(step, {"model": model.state_dict(), "optim": optim.state_dict()})
    """

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
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not below the world size {world_size}")
        self.settings = settings or Settings()
        opens = rank == 0 and not places
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
        self._trigger = trigger or SaveTrigger(self.settings)
        self._watch = SaveWatch(self._trigger)
        self._run = OwnRun(self.root, run_key or _own_run_key())
        self._functions = FunctionSaves(self.root, self.spool)
        self._metrics = MetricsLog(self.root)
        self._failures: list[str] = []
        self._preemption = Preemption()

    @classmethod
    def of_process_group(cls, root: str | Path, **arguments: Any) -> "CheckpointCoordinator":
        """A coordinator for each rank of the default process group; all ranks call it together.

        Ranks learn from each other which nodes they are on, and take rank 0's run key. Further
        ``arguments`` go to the constructor.

        Raises:
            RootError: on all ranks: the root lacks what a commit needs, or the nodes do not see one
                and the same.
            ConfigError, RemoteError: on all ranks: as the constructor's, on rank 0.
        """
        settings = arguments.pop("settings", None) or Settings()
        key = arguments.pop("run_key", None) or _own_run_key()
        places, key = open_together(root, settings, key)
        return cls(
            root,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            places=places,
            run_key=key,
            settings=settings,
            **arguments,
        )

    # ---------------------------------------------------------------- a run of the job

    def resumed_from(self, step: int) -> None:
        """Begin this run at ``step``; saves of earlier runs beyond it, not committed yet, lapse.

        Raises:
            ConfigError: as `check_resume`.
        """
        self.wait_staged()
        self._run.begin_at(step)

    def check_resume(self, step: int) -> None:
        """See that this run can begin at ``step``, before the step is loaded; `load` does it, too.

        Raises:
            ConfigError: this run has begun already, at another step; or its key is that of a run
                that is not new.
        """
        self.wait_staged()  # what is loaded next must not reach an image
        self._run.require_can_begin_at(step)

    def latest(self, kind: Kind = "checkpoint", *, settle_s: float = 0.0) -> Path | None:
        """Folder of the newest committed step of ``kind``, or None if there is none.

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
        return step_folder(self.root, manifest.step) if manifest else None

    def load(self, step: int, *, role: str = "actor") -> dict[str, Any]:
        """This rank's states of a committed step, by component; this run begins at the step.

        A step that cannot be loaded begins nothing, so another may be tried.

        They are read from the spool if this node still holds them, else from disk; the log says
        which. Tensors are on the CPU.

        Raises:
            CommitError: the step is not committed, has no shards for this rank, or is damaged.
            ConfigError: as `check_resume`.
        """
        self.check_resume(step)
        rank, world_size = self.rank, self.world_size
        with take_lease(self.root, step, f"load by rank {rank}", ttl_s=LONG_LEASE_S):
            states = load_states(
                self.root, step, role, rank=rank, world_size=world_size, spool=self.spool
            )
            self.resumed_from(step)  # from here on, retention spares the step for this run
        return states

    # ---------------------------------------------------------------- states

    def save(
        self,
        step: int,
        components: Mapping[str, Any],
        *,
        role: str = "actor",
        kind: Kind = "checkpoint",
        metadata: str | Path | None = None,
        overlap: bool = False,
        keep: int = 0,
        export: Export = "",
    ) -> Staged:
        """Hand the state of one step over; it commits even if this process dies right afterwards.

        Every rank calls it, for every role, with the same ``step`` and ``kind``. What was handed
        over at this step before (the model, for a sync) is not copied again.

        Args:
            step: training step, not negative.
            components: state by component: ``model``, ``optim``, ``extra_state``. Anything that
                ``torch.save`` accepts.
            role: folder below the step's.
            kind: ``state_dict`` for the weights of a sync, ``checkpoint`` for all of it.
            metadata: folder of small files that belong beside the shards; rank 0's counts. It is
                read once: hand a new folder over when its content has changed.
            overlap: return before large tensors are copied, and copy them while the next forward
                and backward pass runs. They must not change before `wait_staged`; have it called
                for you with `wait_staged_before`. Until then the save is not handed over.
            keep: checkpoints that are left once this one is committed, older ones being removed
                after it and never before; 0 leaves all. See `storage.retention`.
            export: have the FSDP shards of the model written as a Hugging Face model, too, into
                ``<role>/huggingface/``, once the step is committed. `wait_all` waits for it.

        Returns:
            What was copied, and how long the caller stood still.

        Raises:
            ConfigError: an argument cannot work.
            SpoolFull: the very first save does not fit into the spool. Later on, a save that
                cannot be handed over does not stop the training: `wait_all` raises it.
        """
        self._check(step, components, role, kind)
        if keep < 0:
            raise ConfigError(f"step {step}: keep={keep} is negative; pass 0 to keep all steps")
        origin = self._origin(
            step, role, kind, keep=keep if kind == "checkpoint" else 0, export=export
        )
        if self.rank == 0:
            self._place(role)
        attached = None
        if kind == "checkpoint":
            self._run.require_new_step(step)
            self.wait_staged()  # until then it is open whether it took the attachments along
            attached = self._attachments.take(step)
        return self._states.save(
            origin, components, metadata=metadata, attachments=attached, overlap=overlap
        )

    def attach(self, name: str, content: str | Path | bytes, *, step: int) -> None:
        """Commit something small with the checkpoint of a step: a dataloader's position, say.

        Call it before `save` of that step (or the engine's ``save_checkpoint``), which stages it
        with the states; it becomes ``global_step_{N}/attachments/{name}``, and
        ``attachments/rank_{R}/{name}`` for a rank other than 0. Where any rank attaches, rank 0
        does, too. With several roles, it goes with the one that is saved first.

        Args:
            name: of the file; again for the same step replaces what was attached.
            content: bytes, or the path of a file, which is read here and now.
            step: training step.

        Raises:
            ConfigError: the name or the path cannot be used, or this step or a later one is being
                saved already.
        """
        self._attachments.add(step, name, content)

    def attachment(self, step: int, name: str, *, rank: int | None = None) -> bytes:
        """What a rank, this one by default, attached to a committed step.

        Raises:
            CommitError: the step is not committed or damaged, or has no such attachment.
            ConfigError: the name cannot be used.
        """
        return self._attachments.read(step, name, self.rank if rank is None else rank)

    def upload(
        self, step: int, collect: Callable[[], Any], *, role: str = "actor"
    ) -> tuple[Published | None, Staged]:
        """Let readers of this node have the model of a step, from shared memory; it is not saved.

        Every rank calls it with the same ``step``. Where the step was saved before, its image is
        the one that they get, and nothing is copied; a save that follows takes the image over.

        Args:
            step: training step, the version of the weights.
            collect: gives the model's state; called only if it has to be staged.
            role: whose weights these are.

        Returns:
            What readers may read; None where it could not be staged, which `wait_all` raises. And
            what staging cost the caller.

        Raises:
            ConfigError: an argument cannot work.
            SpoolFull: the very first image does not fit into the spool.
        """
        origin = self._origin(step, role, "state_dict")
        return self._states.upload(origin, collect)

    def wait_staged(self) -> float:
        """Wait until an overlapped save is staged; from then on the state may change.

        Returns:
            Seconds that the caller stood still.

        Raises:
            SpoolFull, ImageError: as `save`; an image is torn if the state changed too early.
        """
        return self._states.wait_staged()

    def wait_staged_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Have every ``optimizer.step()`` call `wait_staged` first; returns the hook's handle."""

        def wait(*_: Any) -> None:
            self.wait_staged()

        return optimizer.register_step_pre_hook(wait)

    def prewarm(self, nbytes: Mapping[str, int], *, role: str = "actor") -> None:
        """Map and touch the slots of components of so many bytes, before the first save.

        Raises:
            SpoolFull: the spool is too small for them; the message says what is needed.
        """
        self.require_room(sum(nbytes.values()))
        for component, size in nbytes.items():
            self._stager.prewarm(role, component, self.rank, size)

    def require_room(self, nbytes: int) -> None:
        """See at the start that all slots of this node's ranks will fit.

        Args:
            nbytes: bytes of one image of each component of a rank, together.

        Raises:
            SpoolFull: they will not; the message says what is needed.
        """
        here = [place for place in self._places if place.node == self.settings.node]
        ranks = sum(len(place.ranks) for place in here)
        self.spool.check_room(self.settings.slots * nbytes * ranks)

    # ---------------------------------------------------------------- preemption

    def on_preemption(self, signum: int = signal.SIGTERM, *, grace_s: float = 30.0) -> None:
        """Take ``signum`` as the notice that this process ends soon, instead of ending at it.

        The handler only notes the time; ask `preempted` between two steps.

        Args:
            signum: what the scheduler sends: SIGTERM in Kubernetes, that of ``--signal`` in Slurm.
            grace_s: seconds from the signal until the process is killed.

        Raises:
            ConfigError: this is not the main thread, or the signal cannot be caught.
        """
        self._preemption.notice(signum, grace_s)

    @property
    def preempted(self) -> bool:
        """Whether this process was told to end; ranks are told at different times."""
        return self._preemption.noticed

    def any_preempted(self) -> bool:
        """Whether any rank of the default process group was; all ask after the same step."""
        if not dist.is_initialized():
            return self.preempted
        on_cpu = "gloo" in dist.get_backend_config()
        device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
        flag = torch.tensor(int(self.preempted), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def last_words(
        self,
        step: int,
        components: Mapping[str, Any],
        *,
        role: str = "actor",
        metadata: str | Path | None = None,
        deadline_s: float | None = None,
    ) -> LastWords:
        """Save a last step within a deadline: the weights first, the rest after them.

        Every rank calls it at the same step. It raises nothing: what did not get done is in the
        answer and in the log. Copying a component is not interrupted, so the last copy may end
        after the deadline; leave some seconds for it.

        Args:
            step, components, role, metadata: as in `save`.
            deadline_s: seconds for all of it; by default what is left of ``grace_s``.
        """
        left = self._preemption.left_s if deadline_s is None else deadline_s
        self._stager.wait_at_most(left / 4)

        def save(kind: Kind, states: Mapping[str, Any]) -> Sequence[str]:
            staged = self.save(step, states, role=role, kind=kind, metadata=metadata)
            return staged.components

        def committed() -> tuple[Kind, ...]:
            run = self._run.begun().number
            return tuple(kind for kind in KINDS if is_committed(self.root, run, step, kind))

        return say_last_words(
            step, components, left, save=save, wait=self.wait_all, committed=committed
        )

    # ---------------------------------------------------------------- functions

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], Any],
        global_step: int,
        is_state_dict: bool = False,
    ) -> None:
        """Run ``save_fn`` in a background thread; the step's flow waits for it to end.

        It follows Trinity's method. Saves of the same name run one after the other. The files
        below the step's folder that change while it runs enter the manifest. Call it before `save`
        of the same step, or `register_and_monitor` after it: those ask for the flow run.

        Args:
            name: name of the save, unique within a step and rank.
            save_fn: called without arguments. A failure of it fails the step's flow, is raised by
                `wait_all`, and leaves later saves alone.
            global_step: training step.
            is_state_dict: whether it belongs to the sync of the step or to its checkpoint.
        """
        self._functions.start(name, save_fn, self._call_of(name, global_step, is_state_dict))

    def save_sync(
        self, save_fn: Callable[[], Any], global_step: int, is_state_dict: bool = False
    ) -> None:
        """Run ``save_fn`` here and now, e.g. because it calls collectives; as `save_async` else."""
        name = f"sync-{uuid.uuid4().hex[:8]}"
        self._functions.call(save_fn, self._call_of(name, global_step, is_state_dict))

    def _call_of(self, name: str, step: int, is_state_dict: bool) -> Receipt:
        return Receipt(
            name=check_name("name of a save", name),
            run=self._run.begun().number,
            step=step,
            kind="state_dict" if is_state_dict else "checkpoint",
            rank=self.rank,
            process=process_name(os.getpid()),
        )

    # ---------------------------------------------------------------- metrics

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note what was measured at a step, for policies such as ``best=2:reward:max``.

        It may come before the step's commit or after it, from any rank; values of another call add
        to those of the step. A thread writes them to a small file, and logs it if it cannot.

        Args:
            step: training step.
            metrics: numbers by name; a tensor of one element is one.

        Raises:
            ConfigError: a value is no number, or a name is empty or holds ``:``, ``=`` or a comma.
        """
        self._metrics.record(self._run.begun().number, step, metrics)

    # ---------------------------------------------------------------- outcomes

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
    ) -> None:
        """Ask for the flow run of a step whose saves were dispatched; it does not wait for them.

        It follows Trinity's method. A step whose ranks have asked already gets no second run.

        Args:
            global_step: training step.
            is_state_dict: whether the sync or the checkpoint of the step is meant.
            state_dict_thread_count: saves of model weights to expect at least.
            checkpoint_thread_count: other saves to expect at least.
        """
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        self.wait_staged()
        run = self._run.begun()
        tickets = [sealed.ticket for sealed in self.spool.of_step(run.number, global_step)[0]]
        mine = [ticket for ticket in tickets if ticket.kind == kind]
        roles = mine[0].roles if mine else self.roles
        for role in roles:
            if placement(self.root, run.number, run.key, role) is None:  # nothing but functions
                self._place(role)
        expected = state_dict_thread_count + checkpoint_thread_count
        keep = max((ticket.keep for ticket in mine), default=0)
        request = self._request(run, global_step, kind, roles, components_of(mine), keep, expected)
        self._hand_over(request, always=True)

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until all that this process handed over is committed, or has failed.

        Args:
            timeout: seconds; without end by default, also while the Prefect server is away.

        Raises:
            SaveFailed: something was not committed; the message says what, why and where to look.
                Each failure is raised once.
            SaveTimeout: the time is over; the saves may still commit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait_staged()
        self._failures += self._states.take_failures()
        self._failures += self._functions.wait(deadline)  # kept, should the next line time out
        failures = [*self._watch.wait(deadline), *self._failures]
        self._failures = []
        if failures:
            raise SaveFailed("\n".join(failures))

    @property
    def commit_seconds(self) -> Mapping[str, float]:
        """Seconds from hand-over to commit, by request key, of this process's committed saves."""
        return self._watch.commit_seconds

    def close(self, timeout: float = 10.0) -> None:
        """Let go of everything; what was handed over goes on without this process.

        Signals that `on_preemption` took end the process again, or do what they did before.

        Args:
            timeout: seconds to get requests out that Prefect has not taken yet. After that the
                worker of this node finds their images by itself.
        """
        try:
            self._states.close()
        finally:
            self._metrics.close()
            self._watch.close()
            self._trigger.close(timeout)
            self._preemption.forget()
        self.spool.remove_if_unused()

    def __enter__(self) -> "CheckpointCoordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self.preempted:  # then last_words has waited
                self.wait_all()
        finally:
            self.close()

    # ---------------------------------------------------------------- details

    def _origin(
        self, step: int, role: str, kind: Kind, *, keep: int = 0, export: Export = ""
    ) -> Origin:
        if step < 0:
            raise ConfigError(f"step {step} is negative")
        run = self._run.begun()
        return Origin(
            root=str(self.root),
            run=run.number,
            run_key=run.key,
            step=step,
            kind=kind,
            role=check_name("role", role),
            roles=self._roles_of(role, kind),
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

    def _check(self, step: int, components: Mapping[str, Any], role: str, kind: Kind) -> None:
        unknown = set(components) - (set(COMPONENTS) - set(FOLDERS))
        if unknown or not components:
            raise ConfigError(
                f"step {step}: components {sorted(components)}; known are model, optim, "
                "extra_state: put everything else into extra_state"
            )
        if kind == "checkpoint" and role not in self.roles:
            raise ConfigError(
                f"role {role!r} is none of this job's roles {list(self.roles)}; name all roles "
                f'that make one checkpoint, e.g. TRINITY_SYNC_ROLES=\'["actor", "{role}"]\''
            )

    def _roles_of(self, role: str, kind: Kind) -> tuple[str, ...]:
        return self.roles if kind == "checkpoint" else (role,)

    def _ask_for(self, origin: Origin, components: Sequence[str]) -> None:
        if origin.kind == "checkpoint":
            self._attachments.handed_over(origin.step)
        run = self._run.begun()
        request = self._request(
            run, origin.step, origin.kind, origin.roles, components, origin.keep
        )
        self._hand_over(request, exports=origin.role if origin.export else "")

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

    def _hand_over(self, request: SaveRequest, *, always: bool = False, exports: str = "") -> None:
        if self.rank == 0 or always:
            self._trigger.submit(request)
        self._watch.add(request, exports=exports)


def _own_run_key() -> str:
    return os.environ.get("TRINITY_SYNC_RUN") or uuid.uuid4().hex
