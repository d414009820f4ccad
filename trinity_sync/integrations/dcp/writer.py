"""Storage writer and stager of DCP, which stage a save in slots and wait for its commit.

``dcp.async_save`` calls the stager in the training thread, and plans and writes in another one. A
save must survive the trainer from the moment it is staged. So `StepWriter.stage` plans, with DCP's
own ``save`` and a storage that only lays out the files, copies this rank's tensors into a slot and
seals it, with ``.metadata`` on rank 0. What DCP then does with the writer is nothing but waiting
for the commit.

The ranks agree on the plan in a process group of their own, since DCP's thread may use the group
that is passed to it at the same time. Where the plan and the lengths of all values are those of
the save before on all ranks, one all-reduce is all that they exchange.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trinity_sync import SaveHandle
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.state_saver import DcpFolders
from trinity_sync.errors import ConfigError, SaveFailedError
from trinity_sync.integrations.dcp.planned_file import (
    NoStorage,
    PlannedFile,
    make_done,
    make_planning_group,
    reduce_flags,
)
from trinity_sync.layout import check_name, check_number


class DcpSaver:
    """Saves states in DCP's format; each rank has one, and it makes a writer for each save.

    A collective call if there is a process group.

    Args:
        saves: this rank's coordinator, of all ranks of the default process group.
        role: role of the states; their files are in ``global_step_{step}/{role}/``.
        planner: makes the planner of a save, which decides which rank writes a replica. A planner
            of another class is not to be passed to ``async_save``. Its ``enable_plan_caching`` is
            ignored: the saver reuses plans by itself.

    Raises:
        ConfigError: the coordinator is not one of all ranks of the default process group.

    Example::

        saves = CheckpointCoordinator.of_process_group("ckpts")
        checkpoints = DcpSaver(saves)
        for step in range(1, 1001):
            train_one_step()
            if step % 10 == 0:
                writer = checkpoints.writer(step)
                dcp.async_save(state, storage_writer=writer, async_stager=writer, no_dist=True)
        saves.wait_all()
    """

    def __init__(
        self,
        saves: CheckpointCoordinator,
        *,
        role: str = "actor",
        planner: Callable[[], SavePlanner] = DefaultSavePlanner,
    ) -> None:
        self.saves = saves
        self.role = check_name("role", role)
        self.make_planner = planner
        self._group = make_planning_group(saves)
        self._file = PlannedFile(saves.rank, self._group, planner)

    @property
    def metadata(self) -> Metadata:
        """Index of the newest save; complete on rank 0 only."""
        return self._file.metadata

    def writer(self, step: int, *, keep: int = 0) -> "StepWriter":
        """Return the storage writer and stager of one save.

        Args:
            step, keep: as in `CheckpointCoordinator.save`.

        Raises:
            ConfigError: the step is not a whole number.
        """
        return StepWriter(self, check_number("step", step), keep)

    def stage(
        self, state: dict[str, Any], step: int, keep: int, files: Mapping[str, bytes] = {}
    ) -> SaveHandle:
        """Plan, copy and submit a save with small files of rank 0; see `StepWriter.stage`."""
        state = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}

        def lay_out() -> DcpFolders:
            file = self._file.lay_out_again(state)
            if reduce_flags([file is None], self._group) == [True]:
                file = self._file.plan(state, f"step {step}, role {self.role}")
            assert file
            return {"dcp": file}, {".metadata": self._file.index, **files}

        return self.saves.save_dcp(step, lay_out, role=self.role, keep=keep)


class StepWriter(NoStorage, AsyncStager):
    """DCP's storage writer and stager of one save, which `DcpSaver.writer` makes.

    Pass it to ``dcp.async_save`` as ``storage_writer`` and as ``async_stager``. The future that it
    returns is done when the step is committed, and raises why it is not; `wait_all` raises the
    same. It need not be awaited: the save commits without this process. DCP's thread waits for it
    in any case, at most until the coordinator is closed.

    With ``no_dist=True`` the thread that DCP starts exchanges nothing with other ranks, and any
    number of saves may be in flight. Without it, as with any other writer, the next call has to
    wait for the future, and nothing else may use the process group meanwhile.
    """

    def __init__(
        self, saver: DcpSaver, step: int, keep: int, files: Mapping[str, bytes] = {}
    ) -> None:
        self._saver = saver
        self._files = files
        self._step = step
        self._keep = keep
        self._staged: SaveHandle | None = None
        self._metadata = Metadata({})

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy this rank's part of a state into shared memory, and submit the save.

        A collective call. Tensors may change when it returns, and the save commits even if this
        process then dies.

        Args:
            state_dict: state of this rank; a `Stateful` value stands for its ``state_dict()``.

        Returns:
            An empty state, of which DCP has nothing to write.

        Raises:
            ConfigError: this writer has staged a save before.
            SpoolError, ImageError: as in `CheckpointCoordinator.save`, for the first save of this
                process; on all ranks if one cannot plan, or pickle a value. Errors of later saves
                are raised by the future.
        """
        if self._staged is not None:
            raise ConfigError(f"step {self._step} is staged already; make a writer for each save")
        self._staged = self._saver.stage(state_dict, self._step, self._keep, self._files)
        self._metadata = self._saver.metadata
        return {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP calls `synchronize_staging`."""
        return False

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied everything."""

    def close(self) -> None:
        """Keep everything: slots belong to the coordinator."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Refuse another place than the step.

        Raises:
            ConfigError: there is a checkpoint id.
        """
        if checkpoint_id is not None:
            raise ConfigError(
                f"step {self._step}: a checkpoint_id was passed, {checkpoint_id!s}; leave it out, "
                "the writer has the step and its coordinator the root"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Require that the save is staged.

        Raises:
            ConfigError: another stager was used, or none.
            SaveFailedError: it could not be staged.
        """
        if self._staged is None:
            raise ConfigError(
                f"step {self._step} was not staged: pass the writer to dcp.async_save, also as its "
                "async_stager; dcp.save has no stager"
            )
        if self._staged.failure:
            raise SaveFailedError(self._staged.failure)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Wait until the step is committed.

        Raises:
            ConfigError: a planner of another class than the saver's was used; the step was
                saved with the saver's.
            SaveFailedError, SaveTimeoutError: as `SaveHandle.wait`.
        """
        own = type(self._saver.make_planner())
        if type(planner) is not own:
            raise ConfigError(
                f"step {self._step} is saved by a {own.__name__}, not by the "
                f"{type(planner).__name__} that was passed to async_save; pass that to DcpSaver"
            )
        if self._staged is not None:
            self._staged.wait()
        return make_done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the index that the future returns; it is committed."""
        vars(metadata).update(vars(self._metadata))

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"step {self._step}: the writer cannot be sent to another process; use "
            "AsyncCheckpointerType.THREAD, which is the default"
        )
