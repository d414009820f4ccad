"""The workers' side of veRL's trainers: the manager that their FSDP engines make."""

import logging
from pathlib import Path

from trinity_sync.fsdp.manager import FSDPCheckpointManager
from trinity_sync.layout import MANIFEST, step_folder
from trinity_sync.snapshot.stager import ATTACHMENTS, Staged
from trinity_sync.storage.durable import replace_file
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_bytes

logger = logging.getLogger(__name__)

DATA = "data.pt"
"""veRL's name for the dataloader's position, below the step's folder."""


class TrainerCheckpointManager(FSDPCheckpointManager):
    """The manager that veRL's FSDP engine makes; the dataloader's position is committed with it.

    Its coordinator is made at the first save or load, by all ranks of the process group.
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
        """As `FSDPCheckpointManager.save_checkpoint`, with the ``data.pt`` of the step's folder."""
        if local_path is not None:
            root, role = self._place(local_path, global_step)
            coordinator = self._coordinator_of(root)
            data = step_folder(root, global_step) / DATA
            if self.rank == 0 and not self._has_saved:
                self._has_saved = True
                # a warning, because others do not show by default
                logger.warning(
                    "the %s's checkpoints are saved by trinity_sync, not by veRL; look at them "
                    "with: trinity-sync ls %s",
                    role,
                    root,
                )
            first = self.rank == 0 and role == coordinator.roles[0]
            if first and self._is_new("checkpoint", global_step) and data.exists():
                coordinator.attach(DATA, data, step=global_step)
        return super().save_checkpoint(
            local_path, global_step, max_ckpt_to_keep, save_as_hf, hdfs_path=hdfs_path
        )

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """As `FSDPCheckpointManager.load_checkpoint`; ``data.pt`` becomes what was committed."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if local_path is not None and self.rank == 0:
            bring_data(Path(local_path))


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
