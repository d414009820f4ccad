"""veRL's FSDP checkpoint manager with asynchronous saves, which block training for one memcpy.

Saving collects the same states as veRL, stages them, and leaves the rest to the ``save-step`` flow:
it writes and deletes no file and has no barrier. Loading handles states as veRL does, but reads
them from the node's shared memory if they are still there.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager as VerlFSDPCheckpointManager,
)

from trinity_sync import SaveHandle, Staged
from trinity_sync.client.collective import broadcast_from_rank_0, lease_on_rank_0, run_on_all_ranks
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, TrinitySyncError
from trinity_sync.formats.hf_files import ADAPTER, ADAPTER_CONFIG, require_same_adapter
from trinity_sync.formats.shard_reader import require_same_model
from trinity_sync.integrations.verl.fsdp.reshard import is_on_this_mesh, load_resharded
from trinity_sync.integrations.verl.fsdp.state_dict import (
    check_loadable,
    collect_metadata,
    fill_model,
    get_model_state,
    get_model_state_to_stage,
    has_only_adapters,
    has_replicas,
    require_placed,
    require_trained,
    require_whole_parameters,
    select_adapters,
    unwrap_model,
    use_sharded_state_dicts,
)
from trinity_sync.integrations.verl.manager import (
    CommitsDriverFiles,
    ManagerOfPaths,
    split_step_path,
)
from trinity_sync.layout import MANIFEST, Kind, shard_file, split_role_path
from trinity_sync.snapshot.identity import Export
from trinity_sync.snapshot.stager import is_torch_optimizer
from trinity_sync.storage.restore import RestoredShard, load_shards
from trinity_sync.tensors.dtensors import adopt_meshes
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.ray_cluster import in_ray_cluster
from trinity_sync.weights.synchronizer import Synchronizer

logger = logging.getLogger(__name__)


class FSDPCheckpointManager(ManagerOfPaths, VerlFSDPCheckpointManager):
    """Saves and loads one role of a job; replaces ``engine.checkpoint_manager``.

    Every rank has a manager and calls it at the same steps. Paths are
    ``<root>/global_step_<N>/<role>``.

    Args:
        model: the FSDP1 or FSDP2 model.
        optimizer: the model's optimizer; None if the contents do not name it.
        lr_scheduler: the optimizer's schedule, or None.
        processing_class: tokenizer or processor of the model.
        checkpoint_config: veRL's checkpoint config, with ``save_contents`` and ``load_contents`` of
            ``model``, ``optimizer``, ``extra`` and ``hf_model``.
        ray_namespace: Ray namespace of the job's Synchronizer.
        trust_remote_code: whether source files of the model may be imported.
        coordinator: the job's coordinator on this rank; by default made at the first save or load.

    Raises:
        ConfigError: the model has VeOmni's expert parallelism, or several optimizers; or, on rank
            0, its config cannot be saved.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        *,
        ray_namespace: str = "",
        trust_remote_code: bool = False,
        coordinator: CheckpointCoordinator | None = None,
    ) -> None:
        require_whole_parameters(model, optimizer)
        given = (model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        super().__init__(*given, trust_remote_code=trust_remote_code)
        collect_metadata(model, processing_class, again=True)  # errors come before the first save
        self.ray_namespace = ray_namespace
        self.max_ckpt_to_keep: int | None = None
        self.initial_version: int | None = None
        """Step of the weights that explorers start with, which is not saved for a sync."""
        self._coordinator = coordinator
        self._publisher: Publisher | None = None
        self._saved: dict[str, int] = {}
        self._waits_before_steps = False
        self._is_placed = False
        self._has_replicas: bool | None = None

    def save_checkpoint(
        self,
        local_path: str | None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
        *,
        hdfs_path: str | None = None,
    ) -> SaveHandle | None:
        """Submit a save of everything that ``save_contents`` names; return once it is staged.

        Args:
            local_path: ``<root>/global_step_<N>/<role>``; None does nothing.
            global_step: training step, the N of the path.
            max_ckpt_to_keep: number of checkpoints to keep once this one is committed; None, 0
                and below keep all. The save's flow deletes older ones, after the commit.
            save_as_hf: also write the model in Hugging Face format, whatever the contents. The
                save's flow does so, from the shards, after the commit.
            hdfs_path: not used; veRL's engine passes it.

        Returns:
            What was staged, and the seconds that it took; None if nothing was left to save.

        Raises:
            ConfigError: the path has another form, or another step or job than the manager's, or
                the shards of a weight could not be put together; the message names it.
            SpoolFullError: the first save does not fit into the spool. A later save that cannot be
                submitted does not stop training: nothing is staged, and `wait_on_save_thread`
                raises the error.
        """
        if local_path is None:
            return None
        root, role = split_step_path(local_path, global_step)
        self._require(model=self.should_save_model, optimizer=self.should_save_optimizer)
        coordinator = self._get_coordinator(root)
        self.previous_global_step = global_step
        states: dict[str, Any] = {}
        export = save_as_hf or self.should_save_hf_model
        if (self.should_save_model or export) and self._is_new("model", global_step):
            states["model"] = self.get_model_state()
        if self.should_save_optimizer and self._is_new("optim", global_step):
            states["optim"] = self.optimizer.state_dict()
        if self.should_save_extra and self._is_new("extra_state", global_step):
            schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
            states["extra_state"] = {"lr_scheduler": schedule, "rng": self.get_rng_state()}
        if not states and self.should_save_model and self._is_new("checkpoint", global_step):
            states["model"] = self.get_model_state()  # only a sync of the step was submitted
        if export and not states and self._is_new("hf_model", global_step):
            logger.warning(
                "step %d was already submitted without hf_model; once it is committed, run: "
                "trinity-sync export hf %s %d --role %s",
                global_step,
                root,
                global_step,
                role,
            )
        keep = max(max_ckpt_to_keep or 0, 0)
        staged = self._stage(
            coordinator, role, global_step, "checkpoint", states, keep=keep, export=export
        )
        if self.rank == 0:
            self.register_checkpoint(str(local_path), max_ckpt_to_keep)
        return staged

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> SaveHandle | None:
        """Submit the model's weights for a sync; explorers can load them once committed.

        The first call before any save stages nothing, as in Trinity: explorers start from the same
        weights, so it only records which version those are.

        Arguments and result are those of `save_checkpoint`; the step is the version of the weights.
        """
        if local_path is None:
            return None
        root, role = split_step_path(local_path, global_step)
        if not self._saved and self.initial_version is None:
            self.initial_version = global_step
        if not self._is_new("model", global_step) or self.initial_version == global_step:
            return None
        coordinator = self._get_coordinator(root)
        states = {"model": self.get_model_state()}
        return self._stage(coordinator, role, global_step, "state_dict", states)

    def get_model_state(self) -> dict[str, Any]:
        """Return this rank's shards to save: all weights, or those of the adapter.

        Under FSDP2 they are the parameters themselves, for staging; see `UndetachedStateDict`.

        Raises:
            ConfigError: at the first call: the shards of a weight could not be put together, or
                ``save_lora_only`` would leave out weights that are trained.
        """
        state = get_model_state_to_stage(self.model)
        wanted = getattr(self, "should_save_lora_only", False)  # veRL 0.8 has no such setting
        selected = select_adapters(state) if wanted and self._has_lora() else state
        if not self._is_placed:  # placements do not change, nor does what is trained
            require_placed(state)
            require_trained(self.model, selected, state)
            self._is_placed = True
        return selected

    def upload_state_dict(
        self,
        global_step: int,
        *,
        synchronizer: Any = None,
        collect: Callable[[], dict[str, Any]] | None = None,
    ) -> Staged | None:
        """Publish the model's weights in shared memory, see `fsdp_upload_state_dict`.

        `wait_on_save_thread` raises the errors of versions that could not be published.

        Args:
            collect: returns the state to upload, by default `get_model_state`; not called if an
                image of the step is staged already.

        Raises:
            ConfigError: this manager has no coordinator yet.
        """
        if global_step == 0:
            return None
        if self._coordinator is None:
            raise ConfigError(
                f"step {global_step} cannot be uploaded: this manager does not know the job yet; "
                "pass coordinator=..., or save or load first"
            )
        coordinator = self._coordinator
        collect = collect or self.get_model_state
        published, staged = coordinator.upload(global_step, collect)
        if not published:
            return None
        if self._publisher is None:
            root, namespace = coordinator.root, self.ray_namespace or None
            if synchronizer is None and in_ray_cluster():
                synchronizer = Synchronizer.get_actor(namespace=namespace, root=root)
            if synchronizer is not None:
                self._publisher = Publisher(synchronizer, root, coordinator.spool)
        if self._publisher is not None:
            self._publisher.publish(published)
        return staged

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None = None) -> None:
        """Record a submitted checkpoint; the same path in a row counts once.

        Unlike in veRL, nothing is deleted, since the save may still fail: its flow removes older
        steps once this one is committed.

        Args:
            new_path: ``<root>/global_step_<N>/<role>``.
            max_ckpt_to_keep: recorded only; `save_checkpoint` has submitted it.
        """
        if not self.previous_saved_paths or self.previous_saved_paths[-1] != new_path:
            self.previous_saved_paths.append(new_path)
        self.max_ckpt_to_keep = max_ckpt_to_keep

    def load_checkpoint(self, local_path: str | None, *more: Any, **named: Any) -> None:
        """Load this rank's part of a committed step, as veRL does, and resume from it.

        Files are read from the spool if this node still has them, otherwise from disk; the log says
        which. Their digests are compared with the manifest's. A checkpoint without a manifest is
        loaded by veRL. A step of other ranks or another mesh is resharded, see ``reshard``.

        Args:
            local_path: ``<root>/global_step_<N>/<role>``; None does nothing. A folder of another
                job, or in veRL's layout elsewhere, is loaded as initial state; a manager without
                a coordinator resumes the job that it loads from.
            more, named: as in veRL, for a checkpoint without a manifest.

        Raises:
            ConfigError: this run has saved already: load with the manager of a new run. Or
                resharding finds another model or optimizer in the step.
            CommitError: the step is not committed, corrupted or no checkpoint. All ranks raise the
                error of any rank; another step can be loaded afterwards.
        """
        if local_path is None:
            return
        self._require(model=self.should_load_model, optimizer=self.should_load_optimizer)
        contents = {
            "model": self.should_load_model,
            "optim": self.should_load_optimizer,
            "extra_state": self.should_load_extra,
        }
        components = [component for component, wanted in contents.items() if wanted]
        given = Path(local_path)
        folder = given.resolve()
        adapters = getattr(unwrap_model(self.model), "peft_config", None) or {}

        def check() -> tuple[int, bool]:
            require_same_adapter(given / ADAPTER / ADAPTER_CONFIG, adapters.get("default"))
            saved_by = check_loadable(given, self.world_size, components)
            return saved_by, (folder.parent / MANIFEST).exists()

        saved_by, committed = broadcast_from_rank_0(folder, check)
        with self._resuming_from(folder):
            if saved_by != self.world_size or not is_on_this_mesh(folder, self.model):
                states = load_resharded(
                    folder,
                    saved_by,
                    components,
                    committed=committed,
                    model=self.model,
                    optimizer=self.optimizer,
                )
                with closing(states), use_sharded_state_dicts(self.model):
                    for component, state in states:
                        run_on_all_ranks(folder, partial(self._restore_state, component, state))
            elif committed:
                self._load_committed(folder, components)
            else:
                super().load_checkpoint(str(local_path), *more, **named)

    def _load_committed(self, folder: Path, components: Sequence[str]) -> None:
        """Load this rank's own shards; all ranks raise the error of any rank."""
        root, step, role = split_role_path(folder)
        saves = self._coordinator
        spool = saves.spool if saves and saves.root == root else None
        with lease_on_rank_0(root, step) as manifest, use_sharded_state_dicts(self.model):
            filled = {}
            if "model" in components:
                filled = fill_model(self.model, folder, manifest, spool, self.rank, self.world_size)
            files = {
                name: f"{role}/{shard_file(name, self.world_size, self.rank)}"
                for name in components
                if name not in filled
            }
            # load_state_dict copies the model's state, but the optimizer keeps the tensors
            borrow = {path for name, path in files.items() if name == "model"}
            shards = load_shards(
                root, step, [*files.values()], spool=spool, borrow=borrow, manifest=manifest
            )
            with closing(shards):
                for component in components:
                    self._load_next(folder, component, filled, shards)

    def _load_next(
        self,
        folder: Path,
        component: str,
        filled: Mapping[str, Any],
        shards: Iterator[RestoredShard],
    ) -> None:
        if component in filled:
            state = filled[component]
        else:
            state = run_on_all_ranks(folder, lambda: next(shards).state)
            if component == "model":
                both, some = (state, get_model_state(self.model)), has_only_adapters(state)
                run_on_all_ranks(folder, lambda: require_same_model(folder, *both, partial=some))
        run_on_all_ranks(folder, lambda: self._restore_state(component, state))

    def _restore_state(self, component: str, state: Any) -> None:
        """Load one component's state as veRL does."""
        if component == "model":
            self.model.load_state_dict(state, strict=not has_only_adapters(state))
        elif component == "optim":
            adopt_meshes(state, [*self.model.parameters()])
            backfilled = getattr(self, "_backfill_optimizer_state", None)  # veRL 0.8 has none
            self.optimizer.load_state_dict(backfilled(state) if backfilled else state)
        else:
            if "rng" in state:
                self.load_rng_state(state["rng"])
            if state["lr_scheduler"] is not None and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def wait_on_save_thread(self) -> None:
        """Wait until every save of this process is committed, and every version published.

        Raises:
            SaveFailedError: saves failed; the message names them.
            WeightSyncError: versions could not be published.
        """
        super().wait_on_save_thread()
        if self._publisher is not None:
            self._publisher.wait()

    def _require(self, **wanted: bool) -> None:
        for part, needed in wanted.items():
            if needed and getattr(self, part) is None:
                raise ConfigError(
                    f"the checkpoint contents name {part!r}, but this manager was made without it; "
                    f"pass {part}=... or take it out of save_contents and load_contents"
                )

    def _stage(
        self,
        coordinator: CheckpointCoordinator,
        role: str,
        step: int,
        kind: Kind,
        states: dict[str, Any],
        *,
        keep: int = 0,
        export: bool = False,
    ) -> SaveHandle | None:
        if not states:
            return None
        replicated: list[str] = []
        if kind == "checkpoint" and {"model", "extra_state"} <= states.keys():
            if self._has_replicas is None:
                self._has_replicas = has_replicas(self.model, states["model"], self.rank)
            replicated = [name for name in ("model", "optim") if name in states]
        metadata = collect_metadata(self.model, self.processing_class)
        overlap = bool(coordinator.settings.overlap) and self.optimizer is not None
        if overlap and not self._waits_before_steps:
            coordinator.wait_staged_before(self.optimizer)
            self._waits_before_steps = True
        how: Export = "hf_model with remote code" if self.trust_remote_code else "hf_model"
        staged = coordinator.save(
            step,
            states,
            role=role,
            kind=kind,
            metadata=metadata,
            overlap=overlap,
            keep=keep,
            export=how if export else "",
            replicated=replicated if self._has_replicas else (),
        )
        if staged.components:  # another rank may have staged some of the states
            self._saved.update(dict.fromkeys((*states, *staged.components), step))
        if kind == "checkpoint" and staged.components:
            self._saved["checkpoint"] = step
            if export:
                self._saved["hf_model"] = step
        return staged


class TrainerCheckpointManager(CommitsDriverFiles, FSDPCheckpointManager):  # type: ignore[misc]
    """Manager of veRL's FSDP engine, which commits the dataloaders' positions with each step."""

    def prewarm(self, root: Path, role: str) -> None:
        """Touch the memory of a role's first save beside the training; every rank calls it."""
        try:
            self._get_coordinator(root.resolve()).prewarm(list_sizes(self), role=role)
        except TrinitySyncError as error:
            logger.warning("Saves will be slow, or fail: %s", error)


def list_sizes(manager: FSDPCheckpointManager) -> dict[str, Any]:
    """Return what a manager is to save, as `CheckpointCoordinator.prewarm` takes it.

    Optimizers of other libraries are left out.
    """
    sizes: dict[str, Any] = {"model": manager.model}
    if getattr(manager, "should_save_lora_only", False) and manager._has_lora():
        adapter = select_adapters(dict(manager.model.named_parameters()))
        sizes["model"] = torch.nn.ParameterList(adapter.values())
    optimizer = manager.should_save_optimizer and manager.optimizer
    if is_torch_optimizer(optimizer):
        sizes["optim"] = optimizer
    return sizes
