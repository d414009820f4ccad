"""Callback for Lightning's `Trainer`: saves every few steps, and loads what ``ckpt_path`` names.

Lightning collects a checkpoint and passes it to its strategy. The callback replaces two methods of
the strategy for paths below the job's root: one submits the checkpoint, the other loads it. RNG
states, which Lightning does not save, are attached to the step by each rank, and are restored
before the first batch after a resume.

A step is saved after all callbacks have seen its batch. A training that ends where no save is due
is saved there too, unless an epoch ends with it: then before the other callbacks' ``on_train_end``,
in which Lightning's weight averaging replaces the weights.
"""

import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trinity_sync.adapter import MANIFEST, Manifest, step_folder, step_of_folder
from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.formats.shard_reader import require_same_model
from trinity_sync.integrations.import_hooks import replace_attributes
from trinity_sync.integrations.trainer_saves import (
    TrainerSaves,
    get_rng_state,
    list_attachments,
    set_rng_state,
)
from trinity_sync.tensors.torch_private import loads_in_its_own_way

with from_extra("lightning"):
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"
_REST = "meta.pt"
"""Everything else of a sharded checkpoint, under the name that `ModelParallelStrategy` expects."""

_REFUSED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Names of subclasses of supported strategies that save in ways of their own."""


class TrinitySyncCallback(ModelCheckpoint):
    """Saves the checkpoints of a Lightning `Trainer`, in one process, with DDP or FSDP2.

    It takes the place of the `ModelCheckpoint` that Lightning adds otherwise, and makes
    ``ckpt_path="last"`` the newest committed step.

    Args:
        root: the job's root.
        every_n_steps: optimizer steps between two saves, or some more where a batch makes several;
            the last step is saved as well.
        keep: number of steps to keep once a newer one is committed; 0 keeps all.
        settle_s: seconds for which ``ckpt_path="last"`` waits for saves that an earlier run
            submitted on these nodes.
        coordinator: additional keyword arguments of `CheckpointCoordinator`.

    Raises:
        ConfigError: ``every_n_steps`` is less than 1.

    Example::

        saves = TrinitySyncCallback("ckpts", every_n_steps=10)
        trainer = Trainer(callbacks=[saves])
        trainer.fit(module, loader, ckpt_path="last")
    """

    def __init__(
        self,
        root: str | Path,
        *,
        every_n_steps: int,
        keep: int = 0,
        settle_s: float = 60.0,
        **coordinator: Any,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self._root = Path(root).resolve()
        super().__init__(self._root, save_top_k=0, every_n_train_steps=every_n_steps)
        self._every_n_steps = every_n_steps
        self._settle_s = settle_s
        self._arguments = coordinator
        self._keep = keep
        self._strategy: Any = None
        self._saves: TrainerSaves | None = None
        self._saved = -1
        self._loads_last = self._loaded_other = False
        self._rng: Mapping[str, Any] | None = None
        self._loaded: Path | None = None
        """Step of which Lightning has not filled the model yet."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the methods of the trainer's strategy that save and load a checkpoint.

        Raises:
            ConfigError: the strategy is not supported.
        """
        strategy = trainer.strategy
        if strategy is self._strategy:
            return
        supported = SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy
        is_refused = any(each.__name__ in _REFUSED for each in type(strategy).__mro__)
        if is_refused or not isinstance(strategy, supported):
            raise ConfigError(
                f"{type(self).__name__} does not save with {type(strategy).__name__}; take "
                "DDPStrategy, or ModelParallelStrategy for FSDP2"
            )
        if not getattr(strategy, "_save_distributed_checkpoint", True):
            raise ConfigError(
                f"{type(self).__name__} saves the shards of each rank; leave out "
                "save_distributed_checkpoint=False of ModelParallelStrategy"
            )
        save = partial(self._save_below, strategy.save_checkpoint, strategy)
        load = partial(self._load_below, strategy.load_checkpoint, trainer)
        strategy.save_checkpoint = _Replacement(strategy, "save_checkpoint", save)
        strategy.load_checkpoint = _Replacement(strategy, "load_checkpoint", load)
        fill = partial(self._fill, strategy.load_model_state_dict, strategy)
        strategy.load_model_state_dict = _Replacement(strategy, "load_model_state_dict", fill)
        self._strategy = strategy
        trainer.callbacks.insert(0, _SaveLastStep(self))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the step that the training starts at, which is not saved again.

        With accumulated gradients, batches after it are of the same step.

        Raises:
            ConfigError: it starts from another checkpoint, older than the newest step of the root.
        """
        self._saved = trainer.global_step
        if self._loaded_other and trainer.strategy.broadcast(self._root.is_dir()):
            self._get_saves(trainer.strategy).require_nothing_newer(
                self._saved, settle_s=self._settle_s, resume='ckpt_path="last"'
            )
        if not trainer.fast_dev_run:
            self._get_saves(trainer.strategy).prewarm(pl_module, trainer.optimizers)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore the RNG states of the step that was resumed from."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every ``every_n_steps`` steps, and where the training ends within an epoch.

        A batch makes several steps where a module of its own optimization calls several optimizers.
        """
        step, saved = (each // self._every_n_steps for each in (trainer.global_step, self._saved))
        if step > saved or _ends_within_epoch(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save where the training ends within an epoch, and record the metrics of a saved step."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fits and _ends_within_epoch(trainer):  # as of EarlyStopping
            self._save(trainer)
        self._record_metrics(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until all saves are committed; the last step is the ``best_model_path`` then.

        Raises:
            SaveFailedError: a save failed, on all ranks.
        """
        if self._saves is not None:
            try:
                self._saves.wait_all()
            finally:
                self._close()
            self.best_model_path = str(step_folder(self._root, self._saved))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release all resources; saves that are submitted are committed nevertheless."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release all resources, also of a training that had no step left."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: that of `ModelCheckpoint` names files that it has written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return a folder that exists, of which Lightning calls the method that loads.

        Each rank selects a path by itself, before there is a process group. What the path is does
        not matter: the method finds what to load, the same on all ranks.
        """
        self._loads_last = True
        return {str(next(each for each in (self._root, *self._root.parents) if each.is_dir()))}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of the fit, for `pickle` and `copy`."""
        return {**vars(self), "_strategy": None, "_saves": None, "_rng": None}

    def _close(self) -> None:
        """Close what this fit has opened, so that the next one is a run of its own."""
        saves, self._saves = self._saves, None
        self._rng, self._loads_last, self._loaded_other = None, False, False
        if saves is not None:
            saves.close()

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if trainer.fast_dev_run:  # as ModelCheckpoint: nothing is saved, and no run begins
            return
        if step != self._saved:  # with accumulated gradients a step has several batches
            trainer.save_checkpoint(step_folder(self._root, step), weights_only=False)
            self._saved = step
            self._record_metrics(trainer)

    def _record_metrics(self, trainer: Any) -> None:
        if self._saves is not None and not trainer.sanity_checking:
            self._saves.record_metrics(trainer.global_step, trainer.callback_metrics)

    def _save_below(
        self, original: Any, strategy: Any, checkpoint: Any, filepath: Any, *args: Any, **named: Any
    ) -> None:
        step = step_of_folder(Path(filepath).name)
        if step is not None and Path(filepath).resolve().parent == self._root:
            self._submit(step, checkpoint, self._get_saves(strategy))
        else:
            original(checkpoint, filepath, *args, **named)

    def _submit(self, step: int, checkpoint: dict[str, Any], saves: TrainerSaves) -> None:
        if _WEIGHTS not in checkpoint:
            raise ConfigError(
                f"step {step}: the checkpoint has no {_WEIGHTS}, which an on_save_checkpoint has "
                "moved or removed; leave it there, and add to the checkpoint under other keys"
            )

        def collect() -> tuple[dict[str, Any], dict[str, bytes]]:
            rest = {k: v for k, v in checkpoint.items() if k not in (_WEIGHTS, _OPTIMIZERS)}
            files = {_name_rng(saves.rank): _pickle(get_rng_state())}
            optimizers = checkpoint.get(_OPTIMIZERS, [])
            if not saves.is_sharded:
                states = {"model": checkpoint[_WEIGHTS], "optim": optimizers, "extra_state": rest}
                return states, files
            if saves.rank == 0:
                files[_REST] = _pickle(rest)
            numbered = {f"optimizer_{n}": state for n, state in enumerate(optimizers)}
            return {_WEIGHTS: checkpoint[_WEIGHTS], **numbered}, files

        saves.save(step, collect, keep=self._keep)

    def _load_below(
        self, original: Any, trainer: Any, path: Any, *arguments: Any, **named: Any
    ) -> Any:
        def read(source: Any) -> Any:
            return original(source, *arguments, **named)

        selects, self._loads_last = self._loads_last, False
        folder = Path(path).resolve()
        if selects or folder == self._root:
            root, step = self._root, None
        else:
            root, step = folder.parent, step_of_folder(folder.name)
            is_other = step is None or root != self._root
            if is_other and not trainer.strategy.broadcast((folder / MANIFEST).exists()):
                self._loaded_other = not trainer.fast_dev_run
                return read(path)
        loaded = self._load_from_root(root, step, trainer, read)
        if loaded is not None:
            return loaded
        if selects and (other := trainer.strategy.broadcast(_find_other(trainer))):
            rank_zero_info(f"There is no committed step in {self._root}: loading {other}")
            return read(other)
        rank_zero_info(f"There is no committed step in {self._root}: a fresh start")
        if selects and (found := _find_checkpoint(Path(trainer.default_root_dir))):
            rank_zero_warn(
                f"{self._root} has no step, so training begins at step 0, although {found} is "
                f'there. To go on from it, start once with ckpt_path="{found}"'
            )
        trainer.ckpt_path = None
        return _NothingToLoad()

    def _fill(self, original: Any, strategy: Any, checkpoint: Any, strict: bool = True) -> None:
        folder, self._loaded = self._loaded, None
        if folder:
            _require_fit(folder, strategy.lightning_module, checkpoint[_WEIGHTS], strict)
        original(checkpoint, strict=strict)

    def _load_from_root(
        self, root: Path, step: int | None, trainer: Any, read: Callable[[Any], Any]
    ) -> Any:
        """Return the checkpoint of a step, by default the newest; None if there is none."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run
        resumes = fits and root == self._root
        if not resumes and step is None and not trainer.strategy.broadcast(root.is_dir()):
            return None  # the coordinator would make the root
        strategy = trainer.strategy
        saves = self._get_saves(strategy) if resumes else self._make_saves(root, strategy)
        try:
            step = saves.latest_step(settle_s=self._settle_s) if step is None else step
            if step is None:
                return None
            rank_zero_info(f"Loading {step_folder(root, step)}")
            with saves.lease(step) as manifest:
                loaded = self._load(trainer, saves, manifest, read)
                if fits:
                    self._rng = saves.load_attachment(manifest, _name_rng(saves.rank))
                if resumes:
                    saves.begin_at(step)
                return loaded
        finally:
            if not resumes:
                saves.close()

    def _load(
        self, trainer: Any, saves: TrainerSaves, manifest: Manifest, read: Callable[[Any], Any]
    ) -> Any:
        """Return the checkpoint of a leased step, without what of it is loaded already."""
        if not saves.is_sharded:
            states = saves.load_replicated(manifest)
            self._loaded = step_folder(saves.root, manifest.step)
            loaded = {_WEIGHTS: states["model"], _OPTIMIZERS: states["optim"]}
            return {**states["extra_state"], **loaded}
        shards = [record.path for record in manifest.files if record.path.startswith("actor/")]
        names = {Path(path).name: path for path in shards} | list_attachments(manifest)
        # the strategy would have all ranks load from the path of rank 0
        own_path = replace_attributes(trainer.strategy, broadcast=lambda value, src=0: value)
        with saves.open_files(manifest, names.values()) as files, own_path:
            return read(files.make_folder("checkpoint", names))

    def _get_saves(self, strategy: Any) -> TrainerSaves:
        if self._saves is None:
            self._saves = self._make_saves(self._root, strategy)
        return self._saves

    def _make_saves(self, root: Path, strategy: Any) -> TrainerSaves:
        sharded = isinstance(strategy, ModelParallelStrategy)
        own = {} if root == self._root else {"job": None}  # another root keeps its settings
        return TrainerSaves(root, sharded=sharded, **{**self._arguments, **own})


class _SaveLastStep(Callback):
    """The first callback of a trainer: saves the last step before others change the weights."""

    def __init__(self, saves: TrinitySyncCallback) -> None:
        self._saves = saves

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, unless it is saved already."""
        self._saves._save(trainer)


class _Replacement:
    """A method of a strategy that the callback replaces; copies of the strategy have their own.

    Lightning's objects refer to their trainer, so the workers of a loader may get a copy of it.
    """

    def __init__(self, strategy: Any, name: str, function: Callable[..., Any]) -> None:
        self._strategy, self._name, self._function = strategy, name, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    def __reduce__(self) -> Any:
        return getattr, (self._strategy, self._name)


def _require_fit(folder: Path, module: Any, saved: Mapping[str, Any], strict: bool) -> None:
    """Require that a step fills a module; what loads in its own way is not compared."""
    live = module.state_dict()
    wanted = saved.keys() | live.keys() if strict else saved.keys() & live.keys()
    for prefix, each in module.named_modules():
        if loads_in_its_own_way(each):
            wanted -= {name for name in wanted if name.rpartition(".")[0] == prefix}
    require_same_model(folder, *({n: s[n] for n in s if n in wanted} for s in (saved, live)))


def _ends_within_epoch(trainer: Any) -> bool:
    """Return whether the training ends after this batch, which is not the last of its epoch.

    The state is that of the batch then: when `on_train_end` is called, Lightning has counted the
    epoch, and a resume would train on the rest of it as on another one.
    """
    loop = trainer.fit_loop
    stops = trainer.should_stop and loop._can_stop_early
    reached = 0 < trainer.max_steps <= trainer.global_step
    return (stops or reached) and not loop.epoch_loop.batch_progress.is_last_batch


def _find_other(trainer: Any) -> Any:
    """Return the checkpoint that Lightning takes for the last one without this callback, or None.

    It would warn that there is none.
    """
    select = trainer._checkpoint_connector._parse_ckpt_path
    hidden = replace_attributes(TrinitySyncCallback, _find_last_checkpoints=lambda *_: set())
    with hidden, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return select(trainer.state.fn, "last", model_provided=True, model_connected=True)


def _find_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint where Lightning's own callback writes by default, or None."""
    places = ("checkpoints/*.ckpt", "lightning_logs/*/checkpoints/*.ckpt")
    found = (path for place in places for path in folder.glob(place))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


class _NothingToLoad(dict[str, Any]):
    """A checkpoint of which Lightning loads nothing, since it is false."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": lightning.__version__})

    def __bool__(self) -> bool:
        return False


def _name_rng(rank: int) -> str:
    return f"rng_state_{rank}.pth"


def _pickle(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
