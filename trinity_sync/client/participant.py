"""`Participant`: a process beside the trainer whose state is part of the job's checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.client.attachments import list_folder
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.cut import CutMember
from trinity_sync.client.run_context import find_run_key
from trinity_sync.client.save_submitter import SaveHandle
from trinity_sync.errors import ConfigError
from trinity_sync.layout import Kind
from trinity_sync.settings import Settings
from trinity_sync.snapshot.stager import METADATA

STATE = "state"
"""Name of the participant's state in its ``extra_state``."""


class Participant:
    """A controller, queue, rollouter or environment server that saves its state with the trainer's.

    It is a role of its own in the job's checkpoints, and one process: a step is committed once the
    trainer and all other roles have saved it, and fails by the name of a role that has not. It
    needs no ``torch.distributed``. It is made at the start of the process, with the run's key.

    Its state is that of the step if it is saved while the trainer waits in
    `CheckpointCoordinator.cut`: call `wait_cut` regularly, and `save` when it returns a step.

    A participant that was killed starts with all others, from the newest step: its last state is
    older than what the trainer has trained since.

    Args:
        root: the job's folder.
        role: role of this process, such as ``queue``.
        roles: roles that make one checkpoint together, in the trainer's order; by default those of
            the settings.
        run_key: the key of this start of the job, as in `CheckpointCoordinator`; by default
            ``TRINITY_SYNC_RUN_KEY``.
        settings: by default read from the environment.

    Raises:
        ConfigError: there is no key, or the role is none of the roles.
        LockTimeoutError: another living process has the role.
        RootError, SpoolError: as in `CheckpointCoordinator`.

    Example::

        with Participant("ckpts", role="queue", roles=("actor", "queue")) as part:
            step = part.latest_step()
            if step is not None:
                queue.restore(part.load(step))
            while serve_some(queue):
                if (step := part.wait_cut()) is not None:
                    part.save(step, queue.state())
    """

    def __init__(
        self,
        root: str | Path,
        *,
        role: str,
        roles: Sequence[str] | None = None,
        run_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        settings = settings or Settings()
        key = run_key or settings.run_key
        if not key:
            raise ConfigError(
                f"role {role!r} of {root}: pass run_key, or set TRINITY_SYNC_RUN_KEY for all "
                "processes of this start: without it, its states belong to no step of the trainer"
            )
        self._saves = CheckpointCoordinator(root, roles=roles, run_key=key, settings=settings)
        self.role = role
        self._submitted = -1
        """Newest step whose state was submitted."""
        try:
            if role not in self._saves.roles:
                raise ConfigError(
                    f"role {role!r} is none of this job's roles {list(self._saves.roles)}; name "
                    "all roles that make one checkpoint, in trainer and participants"
                )
            key = find_run_key(self._saves.root) or key
            self._member = CutMember(self._saves.root, key, role)
        except BaseException:
            self._saves.close()
            raise

    def latest_step(self, kind: Kind = "checkpoint", *, settle_s: float = 60.0) -> int | None:
        """Return the newest committed step, as `CheckpointCoordinator.latest_step`.

        The trainer and all participants of a start find the same step.
        """
        return self._saves.latest_step(kind, settle_s=settle_s)

    def load(self, step: int) -> Any:
        """Return the state that this role saved at a committed step, from which the run resumes.

        Raises:
            CommitError, ConfigError, RootInUseError: as in `CheckpointCoordinator.load`; also if
                this run has begun at another step, as after the death of this role alone.
        """
        return self._saves.load(step, role=self.role)["extra_state"][STATE]

    def restore_folder(self, step: int, name: str, to: str | Path) -> None:
        """Copy a folder that this role saved at a committed step.

        Args and errors are those of `CheckpointCoordinator.restore_folder`.
        """
        self._saves.restore_folder(step, name, to, role=self.role)

    def prewarm(self, nbytes: int) -> None:
        """Map and touch shared memory for folders of so many bytes: the first cut then waits less.

        Raises:
            SpoolFullError: as `CheckpointCoordinator.prewarm`.
        """
        self._saves.prewarm({METADATA: nbytes}, role=self.role)

    def wait_cut(self, timeout_s: float = 0.0) -> int | None:
        """Return the step whose state the trainer asks for, or None if it asks for none in time.

        It returns the step again until `save` has been called for it.

        Args:
            timeout_s: seconds to wait; by default only look, which reads no file if none changed.
        """
        return self._member.wait(timeout_s)

    def save(
        self, step: int, state: Any, *, folders: Mapping[str, str | Path] | None = None
    ) -> SaveHandle:
        """Submit this role's state of a step, which then survives this process, and say so.

        Args:
            step: training step.
            state: anything that ``torch.save`` accepts and `load` may return, such as tensors,
                numbers, texts and containers of them.
            folders: folders of any size by name, read into shared memory at this call. They become
                ``global_step_{step}/{role}/{name}/...``, and may change once it has returned.

        Raises:
            ConfigError: a folder is none, before the first save; otherwise as
                `CheckpointCoordinator.save`. The trainer's `cut` fails with these as well.
            SaveError: the first save comes after the trainer has ceased to wait; later ones fail.
        """
        try:
            files: dict[str, bytes | Path] = {}
            with self._saves._states.defer_errors(step, "checkpoint", self.role):
                self._member.require_awaited(step)
                for name, folder in (folders or {}).items():
                    files |= list_folder(step, name, Path(folder))
            handle = self._saves.save(
                step, {"extra_state": {STATE: state}}, role=self.role, metadata=files
            )
        except Exception as error:
            self._member.answer(step, str(error) or type(error).__name__)
            raise
        failure = handle.failure
        if not failure and step == self._submitted and handle.images:
            failure = f"step {step} was submitted before with another state; cut the next step"
        self._submitted = step if not handle.failure else self._submitted
        self._member.answer(step, failure)
        return handle

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every step that this role saved is committed or has failed.

        Raises:
            SaveFailedError, SaveTimeoutError: as in `CheckpointCoordinator.wait_all`.
        """
        self._saves.wait_all(timeout)

    def close(self) -> None:
        """Release all resources; what was submitted is committed without this process."""
        self._member.close()
        self._saves.close()

    def __enter__(self) -> "Participant":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._saves.__exit__(kind, error, trace)
        finally:
            self._member.close()
