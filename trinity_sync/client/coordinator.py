"""The trainer's front door: hand a step over, go on training, hear of every failure.

`CheckpointCoordinator.save` is for states, and costs the caller one copy into shared memory and
nothing else. What Trinity calls is in `trinity_calls`; the run, the request for a flow run and what
becomes of it are in `job_process`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from trinity_sync.client.init_root import open_together
from trinity_sync.client.job_process import own_run_key
from trinity_sync.client.preemption import LastWords, say_last_words
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.client.trinity_calls import TrinityCalls
from trinity_sync.errors import ConfigError, SaveFailedError
from trinity_sync.layout import COMPONENTS, FOLDERS, KINDS, Kind, check_number
from trinity_sync.settings import Settings
from trinity_sync.snapshot.stager import Staged
from trinity_sync.snapshot.ticket import Export
from trinity_sync.snapshot.version_tag import Published
from trinity_sync.storage.leases import LONG_LEASE_S, acquire_lease
from trinity_sync.storage.manifest import is_committed
from trinity_sync.storage.restore import load_states


class CheckpointCoordinator(TrinityCalls):
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
        trigger: requests the flow runs; by default of the Prefect server that ``PREFECT_API_URL``
            or the local stack's state file names. Where neither does, rank 0 logs a warning.
        require_stack: ask that server first, and raise where it cannot take saves.

    It belongs to the process that made it: in a child that is forked, leaving its block and `close`
    do nothing, and whatever would save, load or wait raises `ConfigError`.

    Raises:
        ConfigError: an argument cannot work.
        RootError: the file system of the root lacks what a commit needs.
        SpoolError: the spool folder cannot be used.
        PrefectApiError: with ``require_stack``: no server is known, or it does not answer within 5
            seconds, refuses the password or has no deployment of saves.

    Example::

        with CheckpointCoordinator("ckpts") as saves:
            for step in range(1, 1001):
                train_one_step()
                if step % 10 == 0:
                    saves.save(step, {"model": model.state_dict(), "optim": optim.state_dict()})
    """

    @classmethod
    def of_process_group(
        cls, root: str | Path, *, require_stack: bool = False, **arguments: Any
    ) -> "CheckpointCoordinator":
        """A coordinator for each rank of the default process group; all ranks call it together.

        Ranks learn from each other which nodes they are on, and take rank 0's run key. Further
        ``arguments`` go to the constructor.

        Raises:
            RootError: on all ranks: the root lacks what a commit needs, or the nodes do not see one
                and the same.
            ConfigError, RemoteError, PrefectApiError: on all ranks: as the constructor's, on rank
                0.
        """
        settings = arguments.pop("settings", None) or Settings()
        key = arguments.pop("run_key", None) or own_run_key()
        trigger = arguments.get("trigger") or SaveTrigger(settings)
        check = trigger.require_stack if require_stack else None
        places, key = open_together(root, settings, key, check=check)
        return cls(
            root,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            places=places,
            run_key=key,
            settings=settings,
            require_stack=require_stack,
            **arguments,
        )

    def load(self, step: int, *, role: str = "actor") -> dict[str, Any]:
        """This rank's states of a committed step, by component; this run begins at the step.

        A step that cannot be loaded begins nothing, so another may be tried.

        They are read from the spool if this node still holds them, else from disk; the log says
        which. Tensors are on the CPU.

        Raises:
            CommitError: the step is not committed, has no shards for this rank, or is damaged.
            ConfigError: as `check_resume`.
        """
        step = check_number("step", step)
        self.check_resume(step)
        rank, world_size = self.rank, self.world_size
        with acquire_lease(self.root, step, f"load by rank {rank}", ttl_s=LONG_LEASE_S):
            states = load_states(
                self.root, step, role, rank=rank, world_size=world_size, spool=self.spool
            )
            self.resumed_from(step)  # from here on, retention spares the step for this run
        return states

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
        over at this step before (the model, for a sync) is not copied again, unless it has changed
        since; then this save fails, as `wait_all` raises.

        Args:
            step: training step, a whole number from 0 on of whichever integral type.
            components: state by component: ``model``, ``optim``, ``extra_state``. Anything that
                ``torch.save`` accepts.
            role: folder below the step's.
            kind: ``state_dict`` for the weights of a sync, ``checkpoint`` for all of it.
            metadata: folder of small files that belong beside the shards; rank 0's counts. It is
                read once: hand a new folder over when its content has changed.
            overlap: return before large tensors are copied, and copy them while the next forward
                and backward pass runs. They must not change before `wait_staged`; have it called
                for you with `wait_staged_before`. Until then the save is not handed over. A change
                is refused if it is noticed; ``TRINITY_SYNC_CHECK_OVERLAP`` notices all of them.
            keep: checkpoints that are left once this one is committed, older ones being removed
                after it and never before; 0 leaves all. See `retention.prune`.
            export: have the FSDP shards of the model written as a Hugging Face model, too, into
                ``<role>/huggingface/``, once the step is committed. `wait_all` waits for it.

        Returns:
            What was copied, and how long the caller stood still.

        Raises:
            ConfigError: an argument cannot work.
            SpoolError: the very first save cannot be written into the spool.
            ImageError: the very first save cannot be pickled or copied; the message names the key.
                Later on, a save that cannot be handed over does not stop the training:
                `wait_all` raises it.
        """
        self._require_own_process()
        step = check_number("step", step)
        keep = check_number(f"step {step}: keep, of which 0 keeps all steps,", keep)
        self._check(step, components, role, kind)
        if (step, kind) in self._monitored:
            raise ConfigError(
                f"step {step}: register_and_monitor has asked for the flow run of its {kind}, "
                "which may be committed; call save before it"
            )
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
        self._require_own_process()
        self._attachments.add(check_number("step", step), name, content)

    def attachment(self, step: int, name: str, *, rank: int | None = None) -> bytes:
        """What a rank, this one by default, attached to a committed step.

        Raises:
            CommitError: the step is not committed or damaged, or has no such attachment.
            ConfigError: the name cannot be used.
        """
        rank = self.rank if rank is None else check_number("rank", rank)
        return self._attachments.read(check_number("step", step), name, rank)

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
            SpoolError, ImageError: the very first image cannot be staged, as in `save`.
        """
        origin = self._origin(check_number("step", step), role, "state_dict")
        return self._states.upload(origin, collect)

    def wait_staged_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Have every ``optimizer.step()`` call `wait_staged` first; returns the hook's handle."""

        def wait(*_: Any) -> None:
            if self._is_own:  # the memory of a forked child is another
                self.wait_staged()

        return optimizer.register_step_pre_hook(wait)

    def prewarm(self, nbytes: Mapping[str, int], *, role: str = "actor") -> None:
        """Map and touch the slots of components of so many bytes, before the first save.

        Raises:
            SpoolFullError: the spool is too small for them; the message says what is needed.
        """
        self._require_own_process()
        self.require_room(sum(nbytes.values()))
        for component, size in nbytes.items():
            self._stager.prewarm(role, component, self.rank, size)

    def require_room(self, nbytes: int) -> None:
        """See at the start that all slots of this node's ranks will fit.

        Args:
            nbytes: bytes of one image of each component of a rank, together.

        Raises:
            SpoolFullError: they will not; the message says what is needed.
        """
        here = [place for place in self._places if place.node == self.settings.node]
        ranks = sum(len(place.ranks) for place in here)
        self.spool.check_room(self.settings.slots * nbytes * ranks)

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
        self._require_own_process()
        step = check_number("step", step)
        self._metrics.record(self._run.begun().number, step, metrics)

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
        with suppress(ConfigError):  # of another, save says what is wrong with it
            step = check_number("step", step)
        left = self._preemption.left_s if deadline_s is None else deadline_s
        self._stager.wait_at_most(left / 4)

        def save(kind: Kind, states: Mapping[str, Any]) -> Sequence[str]:
            try:
                self.wait_staged()
            except Exception as error:  # of an earlier step, and no reason to lose this one
                self._failures.append(str(error))
            self._failures += self._states.take_failures()
            staged = self.save(step, states, role=role, kind=kind, metadata=metadata)
            if failures := self._states.take_failures():
                raise SaveFailedError("\n".join(failures))
            return staged.components

        def failures() -> list[str]:
            found, self._failures = self._failures, []
            return found

        def committed() -> tuple[Kind, ...]:
            with suppress(Exception):  # a root that is away tells nothing
                run = self._run.begun().number
                return tuple(kind for kind in KINDS if is_committed(self.root, run, step, kind))
            return ()

        kinds: tuple[Kind, ...] = ("state_dict", "checkpoint")
        if step == self._run.resumed_from:  # whose weights are committed
            kinds = ("checkpoint",)
        return say_last_words(
            step,
            components,
            left,
            kinds=kinds,
            save=save,
            wait=self.wait_all,
            failures=failures,
            committed=committed,
        )

    def __enter__(self) -> "CheckpointCoordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_own:
            return  # a child that was forked in the block leaves it
        try:
            if error is None and not self.preempted:  # then last_words has waited
                self.wait_all()
        finally:
            self.close()

    def _check(self, step: int, components: Mapping[str, Any], role: str, kind: Kind) -> None:
        unknown = set(components) - (set(COMPONENTS) - set(FOLDERS))
        if unknown or not components:
            raise ConfigError(
                f"step {step}: components {sorted(map(str, components))}; known are model, optim, "
                "extra_state: put everything else into extra_state"
            )
        if kind == "checkpoint" and role not in self.roles:
            raise ConfigError(
                f"role {role!r} is none of this job's roles {list(self.roles)}; name all roles "
                f'that make one checkpoint, e.g. TRINITY_SYNC_ROLES=\'["actor", "{role}"]\''
            )
