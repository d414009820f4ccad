"""`Checkpoints`, which reads the committed steps of a job, e.g. to evaluate them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trinity_sync.client.attachments import attachment_path
from trinity_sync.client.run_context import note_loaded
from trinity_sync.errors import ConfigError, ManifestError, RootAwayError
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, Kind, check_choice, check_number, check_root
from trinity_sync.snapshot.identity import explain_away, read_identity
from trinity_sync.storage.discovery import (
    find_newest,
    iter_committed_steps,
    read_manifest_state,
    require_committed,
    require_run,
)
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import (
    check_metrics,
    find_run_of_step,
    read_metrics,
    write_metrics,
)
from trinity_sync.storage.restore import load_bytes, load_states
from trinity_sync.storage.runs import is_run_gone, list_runs
from trinity_sync.storage.steps_in_use import lease_to_read, resolve_step
from trinity_sync.weights.committed import name_commit
from trinity_sync.weights.version_view import Target, VersionOpener
from trinity_sync.weights.versions import Version

READER = "Checkpoints"
"""Name of the reader, for its leases."""
CALL_AGAIN = "To use what is there now, call latest_step() or steps() again."


class Checkpoints:
    """Reads the committed steps of a job, and records metrics of them.

    It begins no run, so it can be used next to the training, and before or after it. It needs no
    stack, and writes nothing but metrics and a lease of the step that it reads.

    A later run may commit a number again. All methods are about the commit that this object has
    found or read first, and raise `CommitError` if another run has replaced it, until `latest_step`
    or `steps` returns the number again.

    Args:
        root: the job's root, a folder.

    Raises:
        ConfigError: the root is a URL, is not a folder, or is that of a step.

    Example::

        steps = Checkpoints("ckpts")
        newest = steps.latest_step()
        steps.load_into(newest, model)
        steps.record_metrics(newest, {"reward": evaluate(model)})
    """

    def __init__(self, root: str | Path) -> None:
        check_root(root)
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder; pass the job's root")
        self._found: dict[int, Version] = {}
        """The commits that this object has found, by step."""

    def latest_step(self, kind: Kind = "checkpoint", *, healthy: bool = False) -> int | None:
        """Return the number of the newest committed step, or None if there is none.

        Args:
            kind: ``checkpoint`` for a step to resume from, ``state_dict`` for weights.
            healthy: whether to leave out steps whose weights or optimizer have values that are NaN
                or infinite.

        Raises:
            ConfigError: the kind is unknown.
            FormatError: another release has committed the newest step.
        """
        check_choice("kind", kind, KINDS)
        manifest = find_newest(self.root, kind, healthy=healthy)
        return self._name(manifest, again=True).step if manifest else None

    def steps(self, kind: Kind = "checkpoint") -> list[int]:
        """Return the numbers of all committed steps, without those that are known to be corrupted.

        Args:
            kind: as in `latest_step`.

        Raises:
            ConfigError: the kind is unknown.
        """
        check_choice("kind", kind, KINDS)
        return [
            self._name(each, again=True).step
            for each in iter_committed_steps(self.root)
            if each.serves(kind)
            and read_manifest_state(self.root, each, runs=(), paths=()).state == "valid"
        ]

    def resolve(self, step: int | str) -> int:
        """Return the number of the step that a word names, as `latest_step` does of ``latest``.

        Args:
            step: as in `CheckpointCoordinator.load`.

        Raises:
            ConfigError, CommitError: there is no such tag, or no such checkpoint.
        """
        number = resolve_step(self.root, step)
        if isinstance(step, str) and step != str(number):
            self._name(require_committed(self.root, number, paths=()), again=True)
        return number

    def load(
        self,
        step: int | str,
        *,
        role: str = "actor",
        rank: int = 0,
        world_size: int = 1,
        only: str | Sequence[str] = (),
    ) -> dict[str, Any]:
        """Load the states that one rank saved at a committed step.

        Args:
            step: as in `resolve`.
            role: role whose states are loaded.
            rank: rank that saved them.
            world_size: number of ranks that saved together; any other raises `CommitError`.
            only: as in `CheckpointCoordinator.load`.

        Returns:
            State by component, as `CheckpointCoordinator.load`.

        Raises:
            CommitError: the step is not committed, has no shards of this rank, or is corrupted.
            ConfigError: it has not all components of ``only``.
        """
        rank, world_size = check_number("rank", rank), check_number("world size", world_size)
        step = self.resolve(step)
        with lease_to_read(self.root, step, READER) as manifest:
            self._name(manifest)
            own: Any = {"rank": rank, "world_size": world_size, "manifest": manifest}
            states = load_states(self.root, step, role, **own, only=only)
            note_loaded(self.root, manifest)
            return states

    def load_into(
        self,
        step: int | str,
        target: Target,
        *,
        role: str = "actor",
        dtype: torch.dtype | None = None,
    ) -> int:
        """Copy the weights of a committed step into a module, whatever number of ranks saved them.

        Args:
            step: as in `resolve`.
            target: module, or tensors by name, on any device; every parameter and buffer is filled.
                Shapes are those of the trainer's full tensors.
            role: role of the weights.
            dtype: dtype to which floating-point tensors are rounded as they are copied; by default
                they keep the trainer's, which the target then has to have.

        Returns:
            The step's number.

        Raises:
            CommitError: the step is not committed.
            ConfigError: the target is neither a module nor tensors by name.
            WeightSyncError: it has no such weights or is corrupted; or names, shapes or dtypes
                differ, or a target is a DTensor or on the meta device: nothing was loaded.
        """
        step = self.resolve(step)
        manifest = require_committed(self.root, step, paths=())
        version = replace(self._name(manifest), role=role)
        opener = VersionOpener(READER, verify=True, dtype=dtype)
        with opener.open_checkpoint(version) as view:
            view.load_into(target)
        note_loaded(self.root, manifest)
        return step

    def attachment(self, step: int | str, name: str, *, rank: int = 0) -> bytes:
        """Return what a rank attached to a committed step.

        Args:
            step: as in `resolve`.
            name: name that `CheckpointCoordinator.attach` was given.
            rank: rank that attached it.

        Raises:
            CommitError: the step is not committed, is corrupted, or has no such attachment.
            ConfigError: the name is invalid.
        """
        step = self.resolve(step)
        self._find_run(step)
        return load_bytes(self.root, step, attachment_path(name, rank))

    def metrics(self, step: int | str) -> dict[str, float]:
        """Return the metrics of a step by name; empty if it has none.

        Args:
            step: as in `resolve`; it need not be committed.

        Raises:
            FormatError: another release has recorded them.
        """
        step = self.resolve(step)
        return read_metrics(self.root, self._find_run(step), step)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, for policies such as ``best=2:reward:max``.

        They are added to those that the step has. They count for the run that committed the step,
        or, before its commit, for the newest run.

        Args:
            step: number of the step.
            metrics: numbers by name; a tensor of one element is a number.

        Raises:
            ConfigError: a value is not a number, a name is empty or has ``:``, ``=`` or a comma, or
                the root cannot be written.
            CommitError: another run has replaced the step: nothing is recorded.
            RootAwayError: the root is not there, and is not created.
            LockTimeoutError: other processes record metrics for a minute.
        """
        step = check_number("step", step)
        numbers = check_metrics(step, metrics)
        try:
            write_metrics(self.root, self._find_run(step), step, numbers)
        except OSError as error:
            raise ConfigError(
                f"metrics of step {step} cannot be recorded in {self.root}: {error.strerror}; "
                "record them as a user who may write there"
            ) from error

    def _name(self, manifest: Manifest, *, again: bool = False) -> Version:
        """Return the full name of a commit; require that it was found before, or is found again."""
        now = name_commit(self.root, manifest, "actor", read_identity(self.root))
        if again:
            self._found[now.step] = now
        found = self._found.setdefault(now.step, now)
        require_run(self.root, manifest, found, CALL_AGAIN, found.identity)
        return now

    def _find_run(self, step: int) -> int:
        """Return the run of a step that was found, also if it is gone, or of what is there."""
        with suppress(ManifestError):
            if manifest := read_manifest(self.root, step, ranks=()):
                return self._name(manifest).run
        if not (self.root / PRIVATE_FOLDER).exists():
            raise RootAwayError(explain_away(self.root, f"of step {step}"))
        found = self._found.get(step)
        if found and is_run_gone(list_runs(self.root), found.run, found.run_key):
            require_run(self.root, None, found, CALL_AGAIN)
        return found.run if found else find_run_of_step(self.root, step)
