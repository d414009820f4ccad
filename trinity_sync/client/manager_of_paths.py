"""What veRL's checkpoint managers share here: the coordinator of the job that a path names."""

from pathlib import Path

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.layout import split_role_path


class ManagerOfPaths:
    """Base of managers that are called with paths ``<root>/global_step_<N>/<role>``.

    Each manager saves one job. Its coordinator is made at the first save or load, unless the
    manager was made with one.
    """

    _coordinator: CheckpointCoordinator | None
    _saved: dict[str, int]
    """Newest step that each component, or the whole checkpoint, was submitted at."""

    def _is_new(self, component: str, step: int) -> bool:
        return self._saved.get(component) != step

    def _split_path(self, local_path: str, global_step: int) -> tuple[Path, str]:
        """Return root and role of a path of a step."""
        root, step, role = split_role_path(Path(local_path).resolve())
        if step != global_step:
            raise ConfigError(
                f"checkpoint path {str(local_path)!r} is that of step {step}, but global_step is "
                f"{global_step}; pass the same step in both"
            )
        return root, role

    def _get_coordinator(self, root: Path) -> CheckpointCoordinator:
        if self._coordinator is None:
            self._coordinator = CheckpointCoordinator.of_process_group(root)
        if self._coordinator.root != root:
            raise ConfigError(
                f"this manager saves the job at {self._coordinator.root}, not at {root}; "
                "make one manager and coordinator for each job"
            )
        return self._coordinator

    def _find_resumed_job(self, role_folder: Path) -> tuple[CheckpointCoordinator, int] | None:
        """Return coordinator and step to resume; None if the folder belongs to another job."""
        try:
            root, step, _ = split_role_path(role_folder)
        except ConfigError:
            return None  # a folder in another layout
        if self._coordinator is not None and self._coordinator.root != root:
            return None  # another job, loaded as initial state
        return self._get_coordinator(root), step
