"""The workers' side of veRL's trainers: the manager that their FSDP engines make."""

import logging
from pathlib import Path

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fsdp.manager import FSDPCheckpointManager
from trinity_sync.layout import MANIFEST, is_step_folder, step_folder
from trinity_sync.settings import Settings
from trinity_sync.snapshot.stager import ATTACHMENTS, Staged
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_bytes

logger = logging.getLogger(__name__)

DATA = "data.pt"
"""The PPO trainers' name for the dataloader's position, below the step's folder."""


def position_file(rank: int) -> str:
    """The SFT trainer's name for the position of a rank's dataloader."""
    return f"data_{rank}.pt"


class TrainerCheckpointManager(FSDPCheckpointManager):
    """The manager that veRL's FSDP engine makes; dataloaders' positions are committed with it.

    Its coordinator is made at the first save or load, by all ranks of the process group. The SFT
    trainer knows no roles: its ``<root>/global_step_<N>`` stands for the folder of the first role.
    """

    _has_saved = False

    def save_checkpoint(
        self,
        local_path: str | None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
        *,
        hdfs_path: str | None = None,
    ) -> Staged | None:
        """As `FSDPCheckpointManager.save_checkpoint`, with the positions in the step's folder."""
        if local_path is not None:
            of_sft = is_step_folder(local_path)
            local_path = str(_in_role(Path(local_path)))
            root, role = self._place(local_path, global_step)
            coordinator = self._coordinator_of(root)
            if self.rank == 0 and not self._has_saved:
                self._has_saved = True
                # a warning, because others do not show by default
                logger.warning(
                    "the %s's checkpoints are saved by trinity_sync, not by veRL; look at them "
                    "with: trinity-sync ls %s",
                    role,
                    root,
                )
            data = step_folder(root, global_step) / (position_file(self.rank) if of_sft else DATA)
            mine = (self.rank == 0 or of_sft) and role == coordinator.roles[0]
            if mine and self._is_new("checkpoint", global_step) and data.exists():
                coordinator.attach(data.name, data, step=global_step)
        return super().save_checkpoint(
            local_path, global_step, max_ckpt_to_keep, save_as_hf, hdfs_path=hdfs_path
        )

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """As `FSDPCheckpointManager.load_checkpoint`; positions become what was committed.

        Raises:
            ConfigError: also where the SFT trainer has another number of ranks than the step.
        """
        if local_path is None:
            return
        given = Path(local_path)
        ours = (given / MANIFEST).exists()
        if ours and is_step_folder(given):
            _require_as_many_ranks(given, self.world_size)
        super().load_checkpoint(
            str(_in_role(given) if ours else given), hdfs_path, del_local_after_load
        )
        if is_step_folder(given):
            name = position_file(self.rank)
            committed = f"rank_{self.rank}/{name}" if self.rank else name
            bring_attachment(given, committed, given / name)
        elif self.rank == 0:
            bring_data(given)

    def _run_begun_by(self, role_folder: Path) -> tuple[CheckpointCoordinator, int] | None:
        return super()._run_begun_by(_in_role(role_folder))


def _in_role(folder: Path) -> Path:
    """The folder of the first role in a step's, which is what the SFT trainer names."""
    return folder / Settings().roles[0] if is_step_folder(folder) else folder


def _require_as_many_ranks(folder: Path, world_size: int) -> None:
    """Refuse what would leave the ranks at different places of an epoch, waiting for each other."""
    step = int(folder.name.removeprefix("global_step_"))
    saved_by = max(file.world_size for file in require_committed(folder.parent, step).files)
    if saved_by != world_size:
        raise ConfigError(
            f"step {step} of {folder.parent} was saved by {saved_by} ranks, and this training has "
            f"{world_size}: the positions of veRL's dataloaders are of no use to another number. "
            f"Train on {saved_by} ranks, or begin a new job with the weights that "
            "verl.model_merger makes of the step"
        )


def bring_data(role_folder: Path) -> None:
    """Put the committed dataloader's position where veRL's driver looks for it.

    It is there already, unless the step came from a copy, or a run that was killed wrote another.
    """
    bring_attachment(role_folder.parent, DATA, role_folder.parent / DATA)


def bring_attachment(folder: Path, name: str, to: Path) -> None:
    """Have ``to`` hold what was committed with the step of ``folder`` under that name, if it was.

    Raises:
        CommitError: it is damaged.
    """
    if not (folder / MANIFEST).exists():
        return
    root, step = folder.parent, int(folder.name.removeprefix("global_step_"))
    manifest, path = read_manifest(root, step), f"{ATTACHMENTS}/{name}"
    if manifest and any(record.path == path for record in manifest.files):
        committed = load_bytes(root, step, path)
        if not to.exists() or to.read_bytes() != committed:
            replace_file(to, committed)
