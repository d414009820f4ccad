"""Saves and steps of a trainer, for the callbacks of Hugging Face's and of Lightning's.

The state of a trainer is replicated (one process, DDP) or sharded (FSDP):

- Rank 0 alone saves a replicated state, as a job of one process does. Any number of ranks resumes
  from such a step.
- Each rank saves its shards of a sharded state, in DCP's format, which the loaders of both trainers
  read on any mesh.

All else is small files, such as the RNG states of each rank, which are attached to the step.
"""

import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from trinity_sync import CheckpointCoordinator
from trinity_sync.adapter import (
    PRIVATE_FOLDER,
    Manifest,
    OpenFiles,
    broadcast_from_rank_0,
    lease_on_rank_0,
    load_states,
    open_on_all_ranks,
    run_on_all_ranks,
)
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    SaveTimeoutError,
    TrinitySyncError,
    warn_once,
)
from trinity_sync.integrations.dcp import DcpSaver
from trinity_sync.saves.journal import PATIENCE_S
from trinity_sync.snapshot.packed import read_folder
from trinity_sync.snapshot.stager import ATTACHMENTS, estimate_nbytes, is_torch_optimizer
from trinity_sync.storage.discovery import is_valid, require_whole
from trinity_sync.storage.restore import load_shards
from trinity_sync.storage.steps_in_use import BEST, find_pinned_best, list_best, pin_ahead, unpin

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where a library writes small files: neither a slow nor a full disk concerns a training."""
WAIT_S = 20.0
"""Seconds for which ranks wait for commits between two collective calls, which have a timeout."""


class TrainerSaves:
    """Saves the steps of a trainer, and finds the step that it resumes from.

    Each rank has one. All methods but `record_metrics` are collective calls: every rank returns, or
    every rank raises the error of one.

    Raises:
        ConfigError, RootError, SpoolError: as `CheckpointCoordinator`.
    """

    def __init__(self, root: Path, *, sharded: bool = False, **coordinator: Any) -> None:
        self.root = root
        self.is_sharded = sharded
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_group else 0
        self.world_size = dist.get_world_size() if in_group else 1
        self.has_begun = False
        """Whether the run of the job has begun: by a save, at a step to resume, by an upload."""
        self._saver: DcpSaver | None = None
        self._saved = -1
        self.best: int | None = None
        """Best step, which is pinned; and whether the best steps before it are not any more."""
        self._best_is_alone = False
        self._coordinator: CheckpointCoordinator | None
        if sharded:
            self._coordinator = CheckpointCoordinator.of_process_group(root, **coordinator)
            self._saver = DcpSaver(self._coordinator)
        else:
            self._coordinator = self.run_on_all_ranks(
                lambda: None if self.rank else CheckpointCoordinator(root, **coordinator)
            )

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """This rank's coordinator; with a replicated state only rank 0 has one."""
        assert self._coordinator, "rank 0 alone saves a replicated state"
        return self._coordinator

    # ------------------------------------------------------------ saving

    def prewarm(self, model: int | torch.nn.Module, optimizers: Iterable[Any]) -> None:
        """Touch the memory of the first save beside the training, unless this run has resumed.

        ``model`` is the module or the bytes of its weights. Optimizers of other libraries are left
        out. Too little memory is a warning, since this is an estimate.
        """
        if self.has_begun or self._coordinator is None:
            return
        own = [getattr(each, "optimizer", each) for each in optimizers]  # Accelerate's wrap them
        optim = sum(map(estimate_nbytes, filter(is_torch_optimizer, own)))
        sizes = {"model": estimate_nbytes(model), "optim": optim}
        try:
            self._coordinator.prewarm({"dcp": sum(sizes.values())} if self._saver else sizes)
        except TrinitySyncError as error:
            logger.warning("Saves will be slow, or fail: %s", error)

    def save(
        self,
        step: int,
        collect: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]],
        *,
        metadata: Mapping[str, bytes] | None = None,
        keep: int = 0,
    ) -> None:
        """Submit a step; a second call for the same step does nothing.

        ``collect`` returns the state, and files to attach by name; each rank has other names. The
        state is ``model`` and ``optim`` of a replicated one, of which rank 0's is saved; anything
        that DCP saves of a sharded one. ``metadata`` of rank 0 is committed with a replicated one,
        as by `CheckpointCoordinator.save`. After an error it must not leave other ranks in a
        collective.

        Raises:
            ConfigError, SpoolError, ImageError: as `CheckpointCoordinator.save`.
        """
        if step == self._saved:
            return
        self.has_begun = True
        states, files = self.run_on_all_ranks(collect)
        self._saved = step
        if self._saver is None:  # rank 0 attaches the files of all
            files = {name: file for each in self._gather(files) for name, file in each.items()}

        def submit() -> None:
            if self._coordinator is None:
                return
            for name, content in files.items():
                self._coordinator.attach(name, content, step=step)
            if self._saver is None:
                self._coordinator.save(step, states, metadata=metadata, keep=keep)
            else:
                self._saver.stage(dict(states), step, keep)

        self.run_on_all_ranks(submit)

    def record_metrics(self, step: int, logged: Mapping[str, Any]) -> None:
        """Record what was logged for the step that was saved last; other steps are ignored.

        `select_metrics` selects what can be recorded.
        """
        if self.rank == 0 and step == self._saved and (metrics := select_metrics(logged)):
            self.coordinator.record_metrics(step, metrics)

    def keep_best(self, step: int, *, is_next: bool = False) -> None:
        """Keep the best step, whatever the retention policy; call it before each save.

        The root is written once another step is the best. It is read until that step is committed:
        then the best steps before it are no longer kept. If a step that ``is_next`` to be saved
        cannot be pinned, that is a warning: no policy removes the newest step, and the next call
        tries again.

        Raises:
            CommitError: the step cannot be pinned; the message names the path.
        """

        def pin_step() -> bool:
            try:
                pin_ahead(self.root, step, BEST)
            except OSError as error:
                told = f"the best step {step} of {self.root} cannot be pinned: {error}"
                if not is_next:
                    raise CommitError(
                        f"{told}. A retention policy could remove it, so nothing newer is saved; "
                        f"repair {self.root / PRIVATE_FOLDER / 'pins'} and resume"
                    ) from error
                logger.warning("%s; the next save tries again", told)
                return False
            return True

        def unpin_others() -> bool:
            try:
                if not is_valid(self.root, step):
                    return False
                for each in list_best(self.root):
                    if each != step:
                        unpin(self.root, each)
            except (OSError, TrinitySyncError) as error:
                logger.warning("earlier best steps of %s are still pinned: %s", self.root, error)
                return False
            return True

        if step != self.best:
            if not self.run_on_rank_0(pin_step):
                return
            self.best, self._best_is_alone = step, False
        if not is_next and not self._best_is_alone:
            self._best_is_alone = self.run_on_rank_0(unpin_others)

    def find_best(self, step: int) -> int | None:
        """Return the best step if it is valid, otherwise the newest that is pinned as best."""
        return self.run_on_rank_0(
            lambda: step if is_valid(self.root, step) else find_pinned_best(self.root)
        )

    def wait_all(self) -> None:
        """Wait until all saves are committed, however long a collective call may take.

        Raises:
            SaveFailedError: a save failed.
            SaveTimeoutError: the root has been away for ten minutes.
        """
        here_at = time.monotonic()

        def wait() -> bool:
            nonlocal here_at
            try:
                if self._coordinator:
                    self._coordinator.wait_all(None if self.world_size == 1 else WAIT_S)
            except SaveTimeoutError:
                now = time.monotonic()
                here_at = now if (self.root / PRIVATE_FOLDER).is_dir() else here_at
                if self.world_size == 1 or now >= here_at + PATIENCE_S:
                    raise
                return False
            return True

        while not all(self._gather(self.run_on_all_ranks(wait))):
            pass

    def close(self) -> None:
        """Release all resources; see `CheckpointCoordinator.close`."""
        if self._coordinator:
            self._coordinator.close()

    # ------------------------------------------------------------ resuming

    def latest_step(self, *, settle_s: float) -> int | None:
        """Return the newest committed step, or None if there is none."""
        if self.is_sharded:
            return self.coordinator.latest_step(settle_s=settle_s)
        return self.run_on_rank_0(lambda: self.coordinator.latest_step(settle_s=settle_s))

    @contextmanager
    def lease(self, step: int) -> Iterator[Manifest]:
        """Lease a step within the block, and yield its manifest.

        Raises:
            CommitError: the step is not committed, is corrupted or replaced meanwhile.
            ConfigError: its state is sharded and this trainer's is not, or the other way round.
        """
        with lease_on_rank_0(self.root, step) as manifest:
            require_whole(self.root, manifest)
            sharded = any(record.component == "dcp" for record in manifest.files)
            if sharded != self.is_sharded:
                kinds = {True: "a sharded state (FSDP)", False: "a replicated state"}
                raise ConfigError(
                    f"step {step} in {self.root} has {kinds[sharded]}, and this training has "
                    f"{kinds[self.is_sharded]}; resume it as it was saved, or use another root"
                )
            yield manifest

    def open_files(self, manifest: Manifest, paths: Iterable[str]) -> OpenFiles:
        """Open files of a leased step on each rank, compared with their digests.

        The paths are relative to the step's folder, and the same on all ranks.

        Raises:
            CommitError: a file is corrupted, cannot be read, or may be another user's and would be
                unpickled; or the step was replaced.
        """
        wanted = set(paths)
        records = [record for record in manifest.files if record.path in wanted]
        # DCP's index is a pickle
        return open_on_all_ranks(self.root, manifest, records, unpickled=self.is_sharded)

    def load_replicated(self, manifest: Manifest) -> dict[str, Any]:
        """Return the replicated state of a leased step, from this node's memory if it is there."""
        spool = self._coordinator.spool if self._coordinator else None
        return self.run_on_all_ranks(
            lambda: load_states(self.root, manifest.step, "actor", spool=spool, manifest=manifest)
        )

    def load_attachment(self, manifest: Manifest, name: str) -> Any:
        """Return what `torch.save` wrote into an attachment of a leased step; None without it.

        Each rank may load another one, of any rank.

        Raises:
            CommitError: the file is corrupted, or another user's and holds more than tensors.
        """

        def load() -> Any:
            if path := list_attachments(manifest).get(name):
                return next(load_shards(self.root, manifest.step, [path], manifest=manifest)).state
            return None

        return self.run_on_all_ranks(load)

    def begin_at(self, step: int) -> None:
        """Record that this run resumes from a step; see `CheckpointCoordinator.resumed_from`.

        Raises:
            ConfigError: this run has already begun at another step.
        """
        self.has_begun = True
        if self.is_sharded:
            self.coordinator.resumed_from(step)
        else:
            self.run_on_rank_0(lambda: self.coordinator.resumed_from(step))

    def require_nothing_newer(self, step: int, *, settle_s: float, resume: str) -> None:
        """Require that a checkpoint of ``step`` which is not of the root is not older than it is.

        A script that was written before its first save here loads the same old checkpoint at each
        restart. ``resume`` is the argument with which the trainer resumes from the root.

        Raises:
            ConfigError: the root has a newer step.
        """
        newest = self.latest_step(settle_s=settle_s)
        if newest is not None and newest > step:
            raise ConfigError(
                f"this training has loaded a checkpoint of step {step}, and {self.root} has step "
                f"{newest}: resume with {resume}; to go back to step {step}, save to another root"
            )

    # ------------------------------------------------------------ ranks

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Call a function on every rank; if it fails on one rank, all ranks raise its error."""
        return run_on_all_ranks(self.root, work) if self.world_size > 1 else work()

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result, or raise its error, on every rank."""
        return broadcast_from_rank_0(self.root, work) if self.world_size > 1 else work()

    def _gather(self, here: T) -> list[T]:
        """Return what the ranks pass, by rank."""
        found = [here] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, here)
        return found


def capture_files(write: Callable[[Path], object], prefix: str = "") -> dict[str, bytes]:
    """Return the small files that a function writes into a folder, by prefix and path."""
    with TemporaryDirectory(dir=_MEMORY) as folder:
        write(Path(folder))
        return {f"{prefix}{path}": file for path, file in read_folder(Path(folder)).items()}


def try_capture_files(
    what: str, write: Callable[[Path], object], prefix: str = ""
) -> dict[str, bytes]:
    """Return files that a step can do without, all of them or none; log why they are left out."""
    try:
        return capture_files(write, prefix)
    except Exception as error:  # of transformers, or of a user's tokenizer
        warn_once(f"checkpoints are saved without {what}, which cannot be saved: {error}")
        return {}


def list_attachments(manifest: Manifest) -> dict[str, str]:
    """Return the paths of a step's attachments, of all ranks, by name."""
    paths = [record.path for record in manifest.files]
    return {Path(path).name: path for path in paths if path.startswith(f"{ATTACHMENTS}/")}


def select_metrics(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in what a trainer has logged, under names that a policy can use.

    ``:``, ``=`` and commas in a name become ``_``.
    """
    found = {}
    for name, value in logged.items():
        if name and not isinstance(value, str):
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                found[re.sub("[:=,]", "_", name)] = float(value)
    return found


def get_rng_state() -> dict[str, Any]:
    """Return the RNG states of this process: of Python, NumPy, PyTorch and the current GPU."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Restore what `get_rng_state` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
