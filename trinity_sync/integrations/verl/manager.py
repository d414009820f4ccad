"""What veRL's checkpoint managers share: the job that a path names, and files of veRL's trainers.

The trainers write files for each step: ``data.pt`` and ``transfer_queue`` (PPO), or the position of
each rank's dataloader (SFT). They are committed with the step, and compared with their digests
before a resume, in which veRL reads them from the step's folder.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity_sync import CheckpointCoordinator, SaveHandle
from trinity_sync.adapter import (
    MANIFEST,
    Manifest,
    attaching_folder,
    broadcast_from_rank_0,
    load_bytes,
    read_manifest,
    run_on_all_ranks,
    step_folder,
    step_of_folder,
)
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.layout import is_step_folder, split_role_path
from trinity_sync.settings import Settings
from trinity_sync.snapshot.stager import ATTACHMENTS
from trinity_sync.storage.discovery import list_unnamed_files, require_committed
from trinity_sync.storage.restore import require_digests

logger = logging.getLogger(__name__)


def split_step_path(local_path: str, global_step: int) -> tuple[Path, str]:
    """Return root and role of a path of a step.

    Raises:
        ConfigError: it has another form, or is that of another step.
    """
    root, step, role = split_role_path(Path(local_path).resolve())
    if step != global_step:
        raise ConfigError(
            f"checkpoint path {str(local_path)!r} is that of step {step}, but global_step is "
            f"{global_step}; pass the same step in both"
        )
    return root, role


class ManagerOfPaths:
    """Base of managers that are called with paths ``<root>/global_step_<N>/<role>``.

    Each manager saves one job. Its coordinator is made at the first save or load, unless the
    manager was made with one.
    """

    _coordinator: CheckpointCoordinator | None
    _own_root: Path | None = None
    """The job that is saved, where that is known before there is a coordinator."""
    _saved: dict[str, int]
    """Newest step that each component, or the whole checkpoint, was submitted at."""

    def _is_new(self, component: str, step: int) -> bool:
        return self._saved.get(component) != step

    def _get_coordinator(self, root: Path) -> CheckpointCoordinator:
        if self._coordinator is None:
            self._coordinator = CheckpointCoordinator.of_process_group(root)
        if self._coordinator.root != root:
            raise ConfigError(
                f"this manager saves the job at {self._coordinator.root}, not at {root}; "
                "make one manager and coordinator for each job"
            )
        return self._coordinator

    def wait_on_save_thread(self) -> None:
        """Wait until every save of this process is committed.

        Raises:
            SaveFailedError: saves failed; the message names them.
        """
        if self._coordinator is not None:
            self._coordinator.wait_all()

    def record_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step that this process has saved."""
        if self._coordinator is not None:
            self._coordinator.record_metrics(step, metrics)

    @contextmanager
    def _resuming_from(self, role_folder: Path) -> Iterator[None]:
        """Begin the run at a step that is loaded within the block; a collective call.

        After a failed load another step can be loaded.
        """
        resumed = self._find_resumed_job(role_folder)
        if resumed:
            coordinator, step = resumed
            run_on_all_ranks(role_folder, lambda: coordinator.check_resume(step))
        yield
        if resumed:
            coordinator.resumed_from(step)

    def _find_resumed_job(self, role_folder: Path) -> tuple[CheckpointCoordinator, int] | None:
        """Return coordinator and step to resume; None if the folder belongs to another job."""
        try:
            root, step, _ = split_role_path(role_folder)
        except ConfigError:
            return None  # a folder in another layout
        own = self._coordinator.root if self._coordinator else self._own_root
        if own not in (None, root):
            return None  # another job, loaded as initial state: no run begins there
        return self._get_coordinator(root), step


class CommitsDriverFiles(ManagerOfPaths):
    """Base of the managers of veRL's engines, which commits the trainer's files with each step.

    All ranks of the process group make its coordinator at the first save or load. The SFT trainer
    has no roles: its ``<root>/global_step_<N>`` means the folder of the first role.
    """

    rank: int
    world_size: int
    _has_saved = False

    def save_checkpoint(
        self, local_path: str | None, *, global_step: int = 0, **named: Any
    ) -> SaveHandle | None:
        """Submit a save as the engine's manager does, with the trainer's files.

        The path may be the step's folder. In `attaching_folder`, it names the folder of the files.
        """
        if local_path is not None:
            root, role = split_step_path(str(_role_folder(Path(local_path))), global_step)
            given = step_folder(root, global_step)
            is_attached = root.parts[-3:-1] == attaching_folder("").parts
            root = root.parents[2] if is_attached else root
            local_path = str(step_folder(root, global_step) / role)
            coordinator = self._get_coordinator(root)
            if self.rank == 0 and not self._has_saved:
                self._has_saved = True
                # a warning, since lower levels are not shown by default
                logger.warning(
                    "the %s's checkpoints are saved by trinity_sync, not by veRL; list them with: "
                    "trinity-sync ls %s",
                    role,
                    root,
                )
            attaches = is_attached and self.rank == 0 and role == coordinator.roles[0]
            if attaches and self._is_new("checkpoint", global_step):
                coordinator.attach_written(given, step=global_step)
        save = super().save_checkpoint  # type: ignore[misc] # of the engine's manager
        return save(local_path, global_step=global_step, **named)

    def load_checkpoint(self, local_path: str | None, *more: Any, **named: Any) -> None:
        """Load a step, and check the trainer's files that were committed with it.

        The path may be the step's folder; other arguments are those of the engine's manager.

        Raises:
            ConfigError: as the engine's manager, or the SFT trainer has another number of ranks
                than the step.
            CommitError: as the engine's manager, or one of those files is corrupted.
        """
        if local_path is None:
            return
        load = super().load_checkpoint  # type: ignore[misc] # of the engine's manager
        path = Path(local_path)
        if not is_step_folder(path):
            load(local_path, *more, **named)
            if self.rank == 0 and path.name == Settings().roles[0]:
                _check_driver_files(path.parent, _read_manifest(path.parent))
            return
        manifest = broadcast_from_rank_0(path, lambda: _read_step(path, self.world_size))
        load(str(_role_folder(path) if manifest else path), *more, **named)
        if manifest:
            broadcast_from_rank_0(path, lambda: _check_driver_files(path, manifest))

    def set_root(self, root: Path) -> None:
        """Set the job that is saved, before a step is loaded that may be another job's."""
        self._own_root = root.resolve()  # which the node of the caller may not name so

    def _find_resumed_job(self, role_folder: Path) -> tuple[CheckpointCoordinator, int] | None:
        return super()._find_resumed_job(_role_folder(role_folder))


def _role_folder(folder: Path) -> Path:
    """Return the first role's folder for a step's folder, which the SFT trainer passes."""
    return folder / Settings().roles[0] if is_step_folder(folder) else folder


def _read_step(folder: Path, world_size: int) -> Manifest | None:
    """Return the manifest of a step; None if veRL saved it itself.

    Another number of ranks is refused, whose dataloaders would end an epoch at different times.
    """
    if not (folder / MANIFEST).exists():
        return None
    step = int(folder.name.removeprefix("global_step_"))
    manifest = require_committed(folder.parent, step, paths=())
    saved_by = max(file.world_size for file in manifest.files)
    if saved_by != world_size:
        raise ConfigError(
            f"step {step} of {folder.parent} was saved by {saved_by} ranks, and this training has "
            f"{world_size}: the positions of veRL's dataloaders fit the same number of ranks only. "
            f"Train on {saved_by} ranks, or start a new job with the weights that "
            "verl.model_merger makes of the step"
        )
    return manifest


def restore_attachment(folder: Path, name: str, to: Path) -> None:
    """Write an attachment of a committed step to a file, if the step has it.

    Raises:
        CommitError: the attachment is corrupted.
    """
    manifest, path = _read_manifest(folder), f"{ATTACHMENTS}/{name}"
    if manifest and manifest.find_file(path):
        committed = load_bytes(folder.parent, manifest.step, path, manifest=manifest)
        if not to.exists() or to.read_bytes() != committed:
            replace_file(to, committed)


def _read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a step's folder; None if it is none, or veRL saved it itself."""
    step = step_of_folder(folder.name)
    return None if step is None else read_manifest(folder.parent, step)


def _check_driver_files(folder: Path, manifest: Manifest | None) -> None:
    """Compare the trainer's files with their digests; warn of files that veRL might take for some.

    Raises:
        CommitError: a file is corrupted.
    """
    if manifest is None:
        return
    own = (each for each in manifest.files if each.component == ATTACHMENTS)
    require_digests(folder, (each for each in own if not each.path.startswith(f"{ATTACHMENTS}/")))
    if others := list_unnamed_files(folder.parent, manifest):
        logger.warning("move away what no commit of %s contains: %s", folder, ", ".join(others))
