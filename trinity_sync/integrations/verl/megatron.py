"""The checkpoint manager of veRL's Megatron engine, with asynchronous saves.

A step has veRL's layout (version 2), which its own loader and merger read::

    global_step_40/actor/
      ckpt_contents.json  transformer_config.json
      model/huggingface/            configuration and tokenizer
      model/dist_ckpt/              weights
      optimizer/dist_ckpt/          optimizer and schedule
      extra/dist_ckpt/              states of random number generators

Weights are always saved as Megatron's shards. veRL does so with ``use_dist_checkpointing`` only; by
default it gathers them for a Hugging Face model while training waits.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from verl.utils.checkpoint.megatron_checkpoint_manager import (
    MegatronCheckpointManager as VerlMegatronCheckpointManager,
)

from trinity_sync import CheckpointCoordinator, SaveHandle
from trinity_sync.adapter import MANIFEST, broadcast_from_rank_0, run_on_all_ranks, split_role_path
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.import_hooks import replace_attributes
from trinity_sync.integrations.megatron import DistCheckpointSaver, open_checked
from trinity_sync.integrations.trainer_saves import capture_files
from trinity_sync.integrations.verl.manager import (
    CommitsDriverFiles,
    ManagerOfPaths,
    split_step_path,
)

CONTENTS = "ckpt_contents.json"
FOLDERS = {
    "model": "model/dist_ckpt",
    "optim": "optimizer/dist_ckpt",
    "extra_state": "extra/dist_ckpt",
}
"""Folder of each component, below that of the role."""


class MegatronCheckpointManager(ManagerOfPaths, VerlMegatronCheckpointManager):
    """Saves and loads one role of a job; replaces the manager of veRL's Megatron engine.

    Every rank has a manager and calls it at the same steps. Paths are
    ``<root>/global_step_<N>/<role>``.

    Args:
        named: as in veRL's manager.
        coordinator: the job's coordinator on this rank; by default made at the first save or load.

    Raises:
        ConfigError: the engine trains with Megatron-FSDP or adapters (PEFT), or the contents to
            save name ``hf_model``.
    """

    def __init__(self, *, coordinator: CheckpointCoordinator | None = None, **named: Any) -> None:
        super().__init__(**named)
        unsupported = {
            "use_megatron_fsdp": self.use_megatron_fsdp,
            "adapters (PEFT)": self.peft_cls is not None,
            "hf_model in checkpoint.save_contents": "hf_model" in self.checkpoint_save_contents,
        }
        if asked := [name for name, wanted in unsupported.items() if wanted]:
            raise ConfigError(
                f"trinity_sync does not save Megatron with {', '.join(asked)}; leave that out "
                "(verl.model_merger makes a Hugging Face model of a committed step), or unset "
                "VERL_USE_EXTERNAL_MODULES"
            )
        self._coordinator = coordinator
        self._saved: dict[str, int] = {}
        self._saver: DistCheckpointSaver | None = None
        self._files: dict[str, bytes] = {}
        self._contents: dict[str, Any] = {}
        self.use_dist_checkpointing: bool

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> SaveHandle | None:
        """Submit a save of everything that ``save_contents`` names; return once it is staged.

        Arguments, result and errors are those of `FSDPCheckpointManager.save_checkpoint`, without
        ``save_as_hf``; nothing is left to save of a step that was submitted before.
        """
        if local_path is None:
            return None
        root, role = split_step_path(local_path, global_step)
        coordinator = self._get_coordinator(root)
        if not self._is_new("checkpoint", global_step):
            return None
        self.previous_global_step = global_step
        if self._saver is None:
            # an error of one rank would leave the others in the first collective of the save
            self._files = run_on_all_ranks(
                coordinator.root, lambda: {} if self.rank else self._make_small_files(role)
            )
            self._saver = DistCheckpointSaver(
                coordinator,
                FOLDERS,
                role=role,
                replicas=mpu.get_data_parallel_group(with_context_parallel=True),
            )
        metadata = self._build_sharded_state_dict_metadata()

        def collect() -> dict[str, dict[str, Any]]:
            states: dict[str, dict[str, Any]] = {}
            if self.should_save_model or self.should_save_optimizer:
                model = self._build_model_sharded_state_dict(metadata)
                if self.should_save_optimizer:
                    states["optim"] = self._build_optimizer_state_dict(model, metadata)
                if self.should_save_model:
                    states["model"] = model
            if self.should_save_extra:
                states["extra_state"] = self._build_extra_state_dict()
            return states

        staged = self._saver.save(
            global_step,
            collect,
            content_metadata=metadata,
            files=self._list_small_files(global_step) if self.rank == 0 else None,
            keep=max(max_ckpt_to_keep or 0, 0),
        )
        self._saved["checkpoint"] = global_step  # also if this rank failed: others have not
        return staged

    def load_checkpoint(self, local_path: str | None, *more: Any, **named: Any) -> None:
        """Load a committed step as veRL does, and resume from it; every rank calls it.

        The files are compared with their digests first. Megatron loads a step of another
        parallelism; its optimizer only if it was saved with ``dist_ckpt_optim_fully_reshardable``
        or without ``use_distributed_optimizer``. A checkpoint without a manifest is loaded by veRL.
        Arguments are those of `FSDPCheckpointManager.load_checkpoint`.

        Raises:
            ConfigError: this run has saved already: load with the manager of a new run.
            CommitError: the step is not committed, is corrupted, or has files of another user. All
                ranks raise the error of any rank; another step can be loaded afterwards.
        """
        if local_path is None:
            return
        folder = Path(local_path).resolve()
        committed = broadcast_from_rank_0(folder, lambda: (folder.parent / MANIFEST).exists())
        with self._resuming_from(folder):
            if committed:
                with open_checked(*split_role_path(folder)) as opened, self._saving_shards():
                    run_on_all_ranks(folder, lambda: self._require_fit(opened))
                    super().load_checkpoint(str(opened), None, False)
            else:
                super().load_checkpoint(local_path, *more, **named)

    def _require_fit(self, opened: Path) -> None:
        """Require that a step has the model's shapes: Megatron zeroes some before it compares."""
        saved = opened / FOLDERS["model"]
        if not (self.should_load_dist_ckpt_model and saved.is_dir()):
            return
        known = FileSystemReader(saved).read_metadata().state_dict_metadata
        model = self._build_model_sharded_state_dict(self._load_content_metadata(str(saved)))
        for each in nested_values(model):
            if isinstance(each, ShardedTensor) and not each.allow_shape_mismatch:
                size = getattr(known.get(each.key), "size", None)
                if size is None or tuple(size) != tuple(each.global_shape):
                    raise ConfigError(
                        f"{saved} holds another model: {each.key} has the shape {size} there, and "
                        f"{each.global_shape} here. Nothing was loaded; start from the model that "
                        "was trained there"
                    )

    def _build_optimizer_state_dict(
        self, model_sharded_state_dict: Any, metadata: Any, is_loading: bool = False
    ) -> Any:
        """Build what veRL does, also when the model was loaded into the same state dict before.

        Megatron then no longer finds the parameters in it, and refuses to load an optimizer that is
        fully reshardable or not sharded (veRL 0.9.1).
        """
        if is_loading:
            model_sharded_state_dict = self._build_model_sharded_state_dict(metadata)
        return super()._build_optimizer_state_dict(model_sharded_state_dict, metadata, is_loading)

    def _saving_shards(self) -> AbstractContextManager[None]:
        """Have veRL's manager treat the weights as Megatron's shards within the block."""
        return replace_attributes(self, use_dist_checkpointing=True)

    def _make_small_files(self, role: str) -> dict[str, bytes]:
        """Return rank 0's small files, as veRL writes them, by path.

        `_list_small_files` adds the one that differs from step to step, by its number only.

        Raises:
            ConfigError: the configuration or the tokenizer cannot be written.
        """

        def write(folder: Path) -> None:
            if self.should_save_extra:
                self._save_transformer_config(str(folder))
            if self.should_save_model:
                self._save_hf_config_and_tokenizer(str(folder))
            with self._saving_shards():
                self._contents = self._build_checkpoint_manifest(str(folder), 0, True)

        try:
            return capture_files(write)
        except Exception as error:  # any error of the tokenizer
            raise ConfigError(
                f"the configuration or the tokenizer of role {role} cannot be saved: {error!r}"
            ) from error

    def _list_small_files(self, step: int) -> dict[str, bytes]:
        contents = {**self._contents, "global_step": step}
        return {**self._files, CONTENTS: json.dumps(contents, indent=2, sort_keys=True).encode()}


class TrainerMegatronManager(CommitsDriverFiles, MegatronCheckpointManager):  # type: ignore[misc]
    """Manager of veRL's Megatron engine, which commits the dataloader's position with each step."""
