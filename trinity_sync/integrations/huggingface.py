"""Callback for Hugging Face's `Trainer`, and for the trainers of TRL that derive from it.

It replaces the saves of `Trainer`, at the same steps (``save_strategy``, ``save_steps``), keeps
``save_total_limit`` steps, and makes `train` raise if a save failed. `Trainer` resumes by itself:
`TrinitySyncCallback.latest` makes the folder that it expects, with links to the committed files,
which stay open, so nothing large is written again.

A callback is not called where `Trainer` saves, after the evaluation of the step, and knows nothing
of its trainer. So this module wraps the methods of `Trainer` that save and load, for trainers that
have the callback.
"""

import inspect
import logging
import os
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.adapter import PRIVATE_FOLDER, make_run_key
from trinity_sync.errors import CommitError, ConfigError, TrinitySyncError, from_extra
from trinity_sync.integrations.huggingface_state import (
    FSDP,
    HUGGINGFACE,
    collect_files,
    collect_model_files,
    collect_states,
    has_own_embeddings,
    is_adapted,
    list_lost_methods,
    list_unsupported,
    load_adapter,
    load_shards,
    name_files,
    reads_checkpoints,
    require_fit,
    write_safetensors,
)
from trinity_sync.integrations.import_hooks import Call, replace_attributes, wrapper
from trinity_sync.integrations.trainer_saves import TrainerSaves, list_attachments

with from_extra("hf"):
    from accelerate.state import AcceleratorState, is_initialized
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import SaveStrategy, get_last_checkpoint
    from transformers.utils import ADAPTER_WEIGHTS_NAME

logger = logging.getLogger(__name__)

SETTLE_S = 60.0
"""Seconds to wait for saves in flight before a training resumes."""
_RESUME = "resume_from_checkpoint=saves.latest()"


class TrinitySyncCallback(TrainerCallback):
    """Saves the checkpoints of a `Trainer`, in one process, with DDP or with FSDP2.

    Args:
        root: the job's root.
        coordinator: additional keyword arguments of `CheckpointCoordinator`.

    Example::

        saves = TrinitySyncCallback("ckpts")
        trainer = Trainer(model, TrainingArguments(save_steps=10), callbacks=[saves], ...)
        trainer.train(resume_from_checkpoint=saves.latest())
    """

    def __init__(self, root: str | Path, **coordinator: Any) -> None:
        self.root = self._base = Path(root).resolve()
        self._arguments = coordinator
        self._saves: TrainerSaves | None = None
        self._logged: tuple[int, dict[str, Any]] = (-1, {})
        """What was logged at a step, before it is saved."""
        self._run_key: dict[str, str] = {}
        """Key of a run after the first one of this process; that of the arguments was its own."""
        self._embeddings: bool | None = None
        """Whether embeddings are saved with an adapter; None until a training has begun."""
        self._model_files: dict[str, bytes] | None = None
        """Config and tokenizer; None until the first save of a training."""
        self.loaded: int | None = None
        """Step that `Trainer` has loaded for the training that begins next."""
        self._opened = ExitStack()
        """Removes the folder that was made last, and the link to it, and closes its files."""
        self._made: Path | None = None
        """That folder, until it is removed."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of a training, for `pickle` and `copy`."""
        return {**vars(self), "_saves": None, "_opened": ExitStack(), "_made": None}

    def latest(self, *, settle_s: float = SETTLE_S) -> str | None:
        """Return a folder to resume from the newest committed step; None if there is none.

        The run begins at the step when `Trainer` loads the folder. So another process may call it
        as well, to read the newest weights while a training saves. The folder has the files that
        were compared, even if the step is removed or committed again. It exists in this process,
        until the next call or training step, or as long as the callback.

        With several processes a collective call, which all of them make once their `Trainer` is
        created.

        Args:
            settle_s: seconds to wait for saves in flight on these nodes.

        Raises:
            CommitError: the step is corrupted; its digests are compared here.
            ConfigError: the step has the shards of FSDP, and this training does not use it, or the
                other way round; or the `Trainer` is not created yet.
        """
        saves = self._get_saves()
        step = saves.latest_step(settle_s=settle_s)
        return None if step is None else str(self._make_folder(saves, step))

    def upload(self, step: int, model: torch.nn.Module) -> None:
        """Publish a model's weights to readers on this node, without saving them.

        Nothing is copied again if the step is saved as well.

        Args:
            step: the version of the weights, `Trainer`'s ``state.global_step``.
            model: the model, whose ``state_dict()`` is published.

        Raises:
            ConfigError: there are several processes.
            SaveFailedError: the weights could not be staged.
        """
        saves = self._get_saves()
        if saves.world_size > 1:
            raise ConfigError(
                f"step {step}: the callback uploads the weights of one process, and there are "
                f"{saves.world_size}; upload with a CheckpointCoordinator of your own"
            )
        version, _ = saves.coordinator.upload(step, model.state_dict)
        saves.has_begun = True
        if version is None:
            saves.wait_all()  # which raises why

    def save(self, trainer: Any) -> None:
        """Submit the state of a trainer, in the place of `Trainer._save_checkpoint`; collective.

        Raises:
            ConfigError, SpoolError, ImageError: as `CheckpointCoordinator.save`.
            CommitError: the best step cannot be pinned.
        """
        saves, state = self._get_saves(), trainer.state
        step = state.global_step
        trainer.store_flos()
        best = step if state.best_global_step == step else saves.best
        if trainer.args.load_best_model_at_end:
            if best == step:
                state.best_model_checkpoint = str(self._folder_of(step))
            best = self.find_own_step(state.best_model_checkpoint)
        if best is not None:
            saves.keep_best(best, is_next=best == step)
        keep = max(trainer.args.save_total_limit or 0, 0)  # a negative limit is none
        how = {"sharded": saves.is_sharded, "embeddings": self._decide_embeddings(trainer.model)}
        if self._model_files is None and trainer.args.process_index == 0:
            self._model_files = collect_model_files(trainer)
        saves.save(
            step,
            lambda: (collect_states(trainer, **how), collect_files(trainer)),
            metadata=self._model_files,
            keep=keep,
        )
        logged_at, logged = self._logged
        saves.record_metrics(logged_at, logged)
        if any(map(reads_checkpoints, trainer.callback_handler.callbacks)):
            saves.wait_all()
            folder = self._make_folder(saves, step)
            saves.run_on_rank_0(lambda: self._link(Path(trainer.args.output_dir), folder))

    def prepare(self, trainer: Any, trial: Any) -> None:
        """Prepare to save a trainer, to a root below the callback's for a trial of a search.

        Raises:
            ConfigError: a method of the trainer's class saves what the callback cannot.
        """
        if lost := list_lost_methods(trainer):
            raise ConfigError(
                f"{type(self).__name__} does not save what {', '.join(lost)} may save; override "
                "_save_optimizer_and_scheduler, whose small files are attached to the step, or "
                "leave the callback out"
            )
        name = "" if trial is None else Path(trainer._get_output_dir(trial)).name
        root = self._base / name
        if root != self.root:
            self._close()
            self.root = root

    def find_own_step(self, folder: str | None) -> int | None:
        """Return the step of a folder as `latest` makes it; None for any other folder.

        The path is absolute.
        """
        own = {self._folder_of(0).parent, *([self._made.parent] if self._made else [])}
        return _step_of(folder) if folder and Path(folder).parent in own else None

    def load_best(self, trainer: Any) -> bool:
        """Make the folder that `Trainer._load_best_model` loads, once all saves are committed.

        Return whether there is one; otherwise the weights stay as they are, with a warning. If an
        earlier training could not save the best step, it is the best one before it. A collective
        call.

        Raises:
            SaveFailedError: a save failed.
            CommitError: the best step is corrupted, or cannot be pinned.
        """
        saves, state = self._get_saves(), trainer.state
        saves.wait_all()
        best = _step_of(state.best_model_checkpoint)
        step = saves.find_best(best)
        if step is None:
            logger.warning(
                "The best step %d of %s is not committed, and no other is pinned as the best: "
                "the weights stay those of step %d",
                *(best, self.root, state.global_step),
            )
            state.best_model_checkpoint = None
            return False
        if step != best:
            logger.warning(
                "The best step %d of %s is not committed; step %d is loaded, the best before it",
                *(best, self.root, step),
            )
        saves.keep_best(step)
        state.best_model_checkpoint = str(self._make_folder(saves, step))
        return True

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Require that `Trainer`'s arguments and the model are supported.

        Raises:
            ConfigError: they are not; the message names what.
        """
        if unsupported := list_unsupported(args, parts["model"]):
            raise ConfigError(
                f"{type(self).__name__} does not save with {', '.join(unsupported)}; leave the "
                "callback out, or save with a CheckpointCoordinator of your own"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Begin a run of the job, at the step that `Trainer` has loaded.

        Each training is a run of its own, also after one that raised.

        Raises:
            ConfigError: as `on_init_end`, for a callback that was added later; or `Trainer` has
                loaded another checkpoint, which is older than the newest step of the root.
        """
        self.on_init_end(args, state, control, **parts)
        self._logged = (-1, {})
        if self._saves is not None and self._saves.has_begun:
            try:  # what the training before it has submitted is committed nevertheless
                self._close()
            except TrinitySyncError as error:  # its own failures are no failures of this one
                logger.warning("the training before in %s ended with: %s", self.root, error)
        self._embeddings = self._model_files = None
        self._decide_embeddings(parts["model"])
        step, self.loaded = self.loaded, None
        if state.global_step == 0 and args.process_index == 0:
            self._warn_of_other_checkpoints(args.output_dir)
        if step is not None and step == state.global_step:
            self._get_saves().begin_at(step)
            best = Path(state.best_model_checkpoint or "")
            if best.parts[-3:-1] == (PRIVATE_FOLDER, HUGGINGFACE):  # the root may have moved
                loads_best = args.load_best_model_at_end
                own = str(self._folder_of(_step_of(best.name)))
                state.best_model_checkpoint = own if loads_best else None
        elif state.global_step:
            self._get_saves().require_nothing_newer(
                state.global_step, settle_s=SETTLE_S, resume=_RESUME
            )
        if args.save_strategy != SaveStrategy.NO:
            model, optimizer = parts["model"], parts["optimizer"]
            weights: Any = model
            if is_adapted(model):
                weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            self._get_saves().prewarm(weights, [optimizer])

    def _warn_of_other_checkpoints(self, output_dir: str) -> None:
        """Warn of checkpoints that `Trainer` has saved, if a job without steps begins at step 0."""
        found = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if found and not any(self.root.glob("global_step_*")):
            logger.warning(
                "%s has no step, so training begins at step 0, although %s is there. To go on from "
                "it: %s or get_last_checkpoint(%r), of transformers.trainer_utils",
                *(self.root, found, _RESUME, output_dir),
            )

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Record what is logged at a saved step, such as ``eval_loss``, for retention policies."""
        step, logged = self._logged
        known = logged if step == state.global_step else {}
        self._logged = (state.global_step, {**known, **(parts.get("logs") or {})})
        if self._saves is not None:  # an evaluation may follow the save
            self._saves.record_metrics(*self._logged)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Close the files that `Trainer` has loaded, which keep a removed step's space."""
        if not args.auto_find_batch_size:  # a batch that does not fit has it load them again
            self._close_files()

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wait until all saves are committed.

        Raises:
            SaveFailedError: a save failed, on all ranks.
        """
        self._close_files()
        if self._saves is not None:
            try:
                self._saves.wait_all()
            finally:
                self._close()

    def _make_folder(self, saves: TrainerSaves, step: int) -> Path:
        """Make the folder of a step that `Trainer` loads."""
        with saves.lease(step) as manifest:
            attached = list_attachments(manifest)
            if TRAINER_STATE_NAME not in attached:
                raise CommitError(
                    f"step {step} in {self.root} has no {TRAINER_STATE_NAME}, so it was not saved "
                    f"by {type(self).__name__}; use another root"
                )
            names = name_files(manifest, {*attached}) | attached
            files = saves.open_files(manifest, names.values())
        self._close_files()
        self._opened.enter_context(files)
        self._made = files.make_folder(str(self._folder_of(step).relative_to(self.root)), names)
        if ADAPTER_WEIGHTS_NAME in names:
            write_safetensors(self._made)
        return self._made

    def _link(self, output: Path, folder: Path) -> None:
        """Link a folder as ``checkpoint-N``, until the end of the next step."""
        output.mkdir(parents=True, exist_ok=True)
        link = output / folder.name
        if link.is_symlink():  # of a training that was killed
            link.unlink()
        elif link.exists():
            raise ConfigError(
                f"a callback reads the checkpoint of this save in {link}, where another one is; "
                "move that away, or set another output_dir"
            )
        link.symlink_to(folder)
        self._opened.callback(link.unlink, missing_ok=True)

    def _close_files(self) -> None:
        self._opened.close()
        self._made = None

    def _folder_of(self, step: int) -> Path:
        return self.root / PRIVATE_FOLDER / HUGGINGFACE / f"checkpoint-{step}"

    def _get_saves(self) -> TrainerSaves:
        sharded = is_initialized() and AcceleratorState().distributed_type is FSDP
        if self._saves is not None and self._saves.is_sharded != sharded:
            self._close()  # it was made before the Trainer was
        if self._saves is None:
            launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 or (
                dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            )
            if launched and not is_initialized():
                raise ConfigError(
                    f"{self.root}: there are several processes, and how they share the model is "
                    "not known yet; create the Trainer before the first call"
                )
            arguments = {**self._arguments, **self._run_key}
            self._saves = TrainerSaves(self.root, sharded=sharded, **arguments)
        return self._saves

    def _decide_embeddings(self, model: torch.nn.Module) -> bool:
        """Decide once a training, on rank 0: the caches of other nodes may differ."""
        if self._embeddings is None:
            self._embeddings = is_adapted(model) and self._get_saves().run_on_rank_0(
                lambda: has_own_embeddings(model)
            )
        return self._embeddings

    def _close(self) -> None:
        """End this run; the next call begins another one."""
        if self._saves is not None:
            saves, self._saves = self._saves, None
            self._run_key = {"run_key": make_run_key()} if saves.has_begun else self._run_key
            saves.close()


def _step_of(folder: str) -> int:
    return int(Path(folder).name.removeprefix("checkpoint-"))


def _find_callback(trainer: Any) -> TrinitySyncCallback | None:
    callbacks = trainer.callback_handler.callbacks
    found = [each for each in callbacks if isinstance(each, TrinitySyncCallback)]
    if len(found) > 1:
        roots = ", ".join(str(each.root) for each in found)
        raise ConfigError(
            f"a Trainer saves with one TrinitySyncCallback, and this one has {len(found)} "
            f"({roots}); remove the others"
        )
    return found[0] if found else None


@wrapper
def _wrap_train(original: Call, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    if not (callback := _find_callback(trainer)):  # which requires that there are not two
        return original(trainer, *args, **kwargs)
    callback.prepare(trainer, kwargs.get("trial"))
    # of the trainer: what a method of its class writes after `Trainer`'s belongs to the save too
    with replace_attributes(trainer, _save_checkpoint=partial(_save_checkpoint, trainer)):
        return original(trainer, *args, **kwargs)


def _save_checkpoint(trainer: Any, model: Any, trial: Any) -> None:
    if callback := _find_callback(trainer):
        callback.save(trainer)
    else:  # it was removed meanwhile
        type(trainer)._save_checkpoint(trainer, model, trial)


@wrapper
def _wrap_load(original: Call, *args: Any, **kwargs: Any) -> None:
    # the names of the parameters are the original's
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    trainer, checkpoint = list(given.values())[:2]
    callback = _find_callback(trainer)
    if callback and checkpoint and not Path(checkpoint).is_dir():  # `Trainer` would begin at step 0
        raise ConfigError(f"{checkpoint} was removed: start again, with {_RESUME}")
    ours = callback and callback.find_own_step(checkpoint) is not None
    of_model = original.__name__ == "_load_from_checkpoint"
    if ours and of_model:
        require_fit(trainer.model, Path(checkpoint))
    with load_shards(trainer) if ours else nullcontext():
        if not (ours and of_model and load_adapter(trainer.model, checkpoint)):
            original(*args, **kwargs)
    if callback and checkpoint:
        callback.loaded = callback.find_own_step(str(Path(checkpoint).resolve()))


@wrapper
def _wrap_load_best_model(original: Call, trainer: Any) -> None:
    callback = _find_callback(trainer)
    if not callback or callback.find_own_step(trainer.state.best_model_checkpoint) is None:
        original(trainer)
    elif callback.load_best(trainer):
        with load_shards(trainer):
            if not load_adapter(trainer.model, trainer.state.best_model_checkpoint):
                original(trainer)


Trainer.train = _wrap_train(Trainer.train)
Trainer._load_from_checkpoint = _wrap_load(Trainer._load_from_checkpoint)
Trainer._load_optimizer_and_scheduler = _wrap_load(Trainer._load_optimizer_and_scheduler)
Trainer._load_best_model = _wrap_load_best_model(Trainer._load_best_model)
