"""TorchTitan's checkpoint manager with trinity_sync below it, in the place of its DCP writes.

TorchTitan decides when to save, what belongs to a step, what to load and where it goes, as with its
own `CheckpointManager`. A save is staged in shared memory and commits in another process, and steps
are loaded with `StepReader`. Nothing is deleted here: the save removes old steps after its commit.

Importing this module registers `use_trinity_sync` with TorchTitan's overrides, by which the command
line of any TorchTitan training names it.
"""

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.state_dict_loader import load

from trinity_sync import CheckpointCoordinator
from trinity_sync.adapter import MANIFEST, refuse_url, split_role_path, step_folder
from trinity_sync.errors import ConfigError, SpoolFullError, from_extra
from trinity_sync.integrations.dcp import DcpSaver, StepReader
from trinity_sync.snapshot.stager import estimate_nbytes

with from_extra("torchtitan"):
    from torchtitan.components.checkpointer import MODEL, BaseCheckpointManager, CheckpointManager
    from torchtitan.config import derive, override

logger = logging.getLogger(__name__)


class TrinitySyncCheckpointManager(CheckpointManager):
    """Saves and loads the steps of a TorchTitan training; TorchTitan makes one on each rank.

    ``dump_folder/folder`` is the job's root, of which the steps have DCP's files in
    ``global_step_{N}/{role}/``, with the first role of the settings.

    Args:
        config: TorchTitan's settings. ``keep_latest_k`` is the number of steps that remain once the
            newest is committed; ``async_mode`` has no effect.
        base_folder: TorchTitan's ``dump_folder``.
        components: what TorchTitan passes to any checkpoint manager.

    Raises:
        ConfigError: the folder has steps that TorchTitan saved itself, or is a URL; or
            ``last_save_in_hf`` is set.

    Example::

        config.checkpoint = TrinitySyncCheckpointManager.Config(enable=True, interval=100)
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Settings of TorchTitan's `CheckpointManager`, which build this manager."""

    def __init__(self, config: Config, *, base_folder: str = "", **components: Any) -> None:
        # TorchTitan waits for nothing between saves then, and deletes nothing
        given = dataclasses.replace(cast(Any, config), async_mode="disabled", keep_latest_k=0)
        super().__init__(given, base_folder=base_folder, **components)
        if not self.enable:
            return
        refuse_url(self.folder)
        if self.last_save_in_hf:
            raise ConfigError(
                f"checkpoint.last_save_in_hf cannot be saved to {self.folder} by trinity_sync; "
                "unset it, and convert the last step with TorchTitan's convert_to_hf.py"
            )
        if (step := super()._find_load_step()) != -1:
            raise ConfigError(
                f"{self.folder} has steps that TorchTitan saved without trinity_sync, up to step-"
                f"{step}; set another checkpoint.folder, and to continue from that step "
                f"checkpoint.initial_load_path={Path(self.folder).resolve() / f'step-{step}'} and "
                "checkpoint.initial_load_model_only=False"
            )
        self._keep = config.keep_latest_k
        self._saves: CheckpointCoordinator | None = CheckpointCoordinator.of_process_group(
            self.folder
        )
        self._saver = DcpSaver(self._saves, role=self._saves.roles[0])
        if self.load_only:
            return  # no memory for saves
        states = *components["model_parts"], *(components["optimizers"] or ())
        try:
            self._saves.prewarm({"dcp": sum(map(estimate_nbytes, states))}, role=self._saver.role)
        except SpoolFullError as error:  # the size is an estimate
            logger.warning("Saves will be slow, or fail: %s", error)

    def __del__(self) -> None:
        """Leave saves in flight to the stack: they commit without this process."""

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any
    ) -> None:
        """Stage a state and submit its save, which then commits even if this process dies.

        Raises:
            SpoolError, ImageError: as in `StepWriter.stage`, for the first save of this process.
        """
        _, step, _ = split_role_path(checkpoint_id)
        self._saver.writer(step, keep=self._keep).stage(state_dict)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a committed step into a state; TorchTitan loads what is no step of trinity_sync.

        Raises:
            CheckpointException: the step is not committed or is corrupted; see `StepReader`.
        """
        assert self._saves
        folder = Path(checkpoint_id).resolve()
        is_own = folder.parent.parent == self._saves.root
        if not is_own and not (folder.parent / MANIFEST).exists():
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        root, step, role = split_role_path(folder)
        load(state_dict, storage_reader=StepReader(root, step, role=role))
        self.states[MODEL].load_state_dict(state_dict)
        if is_own and not self.load_only:
            self._saves.resumed_from(step)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest committed step, as TorchTitan wants it: -1 if there is none."""
        assert self._saves
        step = self._saves.latest_step()
        return -1 if step is None else step

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(step_folder(folder or self.folder, step) / self._saver.role)

    def _close(self) -> None:
        """Wait for all commits; after an error of the training, leave them to the stack."""
        saves, self._saves = self._saves, None
        if saves is None:
            return
        try:
            if sys.exc_info()[0] is None:
                saves.wait_all()
        finally:
            saves.close()


@override(
    target=BaseCheckpointManager.Config,
    description="saves are staged in shared memory and commit in the background",
)
def use_trinity_sync(config: BaseCheckpointManager.Config) -> TrinitySyncCheckpointManager.Config:
    """Replace TorchTitan's own checkpoint manager in a configuration; its settings remain.

    ::

        --override.imports trinity_sync.integrations.torchtitan.use_trinity_sync

    Args:
        config: settings of TorchTitan's own checkpoint manager, or of this one.

    Returns:
        The same settings, which build a `TrinitySyncCheckpointManager`.

    Raises:
        ConfigError: they are of another manager, which does more than TorchTitan's own.
    """
    if type(config) not in (CheckpointManager.Config, TrinitySyncCheckpointManager.Config):
        raise ConfigError(
            f"the override use_trinity_sync cannot replace {type(config).__qualname__}, only "
            "TorchTitan's own CheckpointManager; leave it out of override.imports, or set "
            "checkpoint=CheckpointManager.Config(...)"
        )
    return derive(config, TrinitySyncCheckpointManager.Config)
