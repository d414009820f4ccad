"""veRL's FSDP checkpoint manager, with saves that cost the training loop one memory copy.

Saving collects the same states as veRL, stages them, and leaves the rest to the ``save-step`` flow:
no file is written, nothing is deleted and no barrier is taken here. Loading does with a state what
veRL does, and gets it faster: from the node's memory if it is still there.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager as VerlFSDPCheckpointManager,
)

from trinity_sync.client.collective import run_on_all_ranks
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.fsdp.collective import lease_step_on_all_ranks
from trinity_sync.fsdp.metadata import metadata_folder
from trinity_sync.fsdp.reshard import load_resharded
from trinity_sync.fsdp.state_dict import (
    get_model_state_to_stage,
    has_only_adapters,
    select_adapters,
    use_sharded_state_dicts,
)
from trinity_sync.fsdp.validate import check_loadable
from trinity_sync.layout import MANIFEST, Kind, shard_file, split_role_path
from trinity_sync.snapshot.save_id import Export
from trinity_sync.snapshot.stager import Staged
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.restore import RestoredShard, load_shards
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.ray_cluster import in_ray_cluster
from trinity_sync.weights.synchronizer import Synchronizer

logger = logging.getLogger(__name__)


class FSDPCheckpointManager(VerlFSDPCheckpointManager):
    """Saves and loads one role of a job; stands in for ``engine.checkpoint_manager``.

    Every rank makes one and calls it at the same steps. Paths are
    ``<root>/global_step_<N>/<role>``.

    Args:
        model: the FSDP1 or FSDP2 model.
        optimizer: may be None where neither saving nor loading asks for it.
        lr_scheduler: may be None.
        processing_class: tokenizer or processor that goes with the model.
        checkpoint_config: veRL's, with ``save_contents`` and ``load_contents`` of ``model``,
            ``optimizer``, ``extra`` and ``hf_model``.
        ray_namespace: where the job's Synchronizer is looked up.
        trust_remote_code: whether source files of the model may be imported.
        coordinator: of the job; made at the first save or load if None.
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
        super().__init__(
            model,
            optimizer,
            lr_scheduler,
            processing_class,
            checkpoint_config,
            trust_remote_code=trust_remote_code,
        )
        self.ray_namespace = ray_namespace
        self.max_ckpt_to_keep: int | None = None
        self.announced_version: int | None = None
        """Step that explorers hold without a save of it: what was trained when syncing began."""
        self._coordinator = coordinator
        self._publisher: Publisher | None = None
        self._saved: dict[str, int] = {}
        self._waits_before_steps = False

    def save_checkpoint(
        self,
        local_path: str | None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
        *,
        hdfs_path: str | None = None,
    ) -> Staged | None:
        """Hand everything that ``save_contents`` names over to be saved; returns once it is staged.

        Args:
            local_path: ``<root>/global_step_<N>/<role>``; None does nothing.
            global_step: training step, the N of the path.
            max_ckpt_to_keep: checkpoints that are left once this one is committed; None and 0
                leave all. Nothing is deleted here: the save's flow does it, after the commit.
            save_as_hf: have the model written in Hugging Face format, too, whatever the contents:
                from the shards, by the save's flow, after the commit.
            hdfs_path: unused; veRL's engine passes it.

        Returns:
            What was staged, and the seconds that it took; None where nothing was left to save.

        Raises:
            ConfigError: the path is of another form, step or job than what was said before.
            SpoolFullError: the very first save does not fit into the spool. A later save that
                cannot be submitted does not stop the training: nothing is staged, and
                `wait_on_save_thread` raises it.
        """
        if local_path is None:
            return None
        root, role = self._place(local_path, global_step)
        self._require(model=self.should_save_model, optimizer=self.should_save_optimizer)
        coordinator = self._coordinator_of(root)
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
            states["model"] = self.get_model_state()  # the step's sync was handed over, and is none
        if export and not states and self._is_new("hf_model", global_step):
            logger.warning(
                "step %d was handed over already without hf_model; once it is committed, run: "
                "trinity-sync export %s %d --role %s",
                global_step,
                root,
                global_step,
                role,
            )
        staged = self._stage(
            coordinator,
            role,
            global_step,
            "checkpoint",
            states,
            keep=max_ckpt_to_keep or 0,
            export=export and bool(states),
        )
        if self.rank == 0:
            self.register_checkpoint(str(local_path), max_ckpt_to_keep)
        return staged

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> Staged | None:
        """Hand the model's weights over for a sync; explorers may load them once committed.

        The first call before any save writes nothing, as in Trinity: explorers start from the same
        weights, so it only tells which version those are.

        Args:
            local_path: ``<root>/global_step_<N>/<role>``; None does nothing.
            global_step: training step, the N of the path, which is the version of the weights.

        Returns:
            What was staged; None where nothing was left to save.
        """
        if local_path is None:
            return None
        root, role = self._place(local_path, global_step)
        if not self._saved and self.announced_version is None:
            self.announced_version = global_step
        if not self._is_new("model", global_step) or self.announced_version == global_step:
            return None
        coordinator = self._coordinator_of(root)
        states = {"model": self.get_model_state()}
        return self._stage(coordinator, role, global_step, "state_dict", states)

    def get_model_state(self) -> dict[str, Any]:
        """This rank's shards of what a save of the model holds: all weights, or the adapter's.

        Under FSDP2 they are the parameters themselves, to be staged; see `UndetachedStateDict`.
        """
        state = get_model_state_to_stage(self.model)
        wanted = getattr(self, "should_save_lora_only", False)  # veRL 0.8 has no such setting
        return select_adapters(state) if wanted and self._has_lora() else state

    def upload_state_dict(
        self,
        global_step: int,
        *,
        synchronizer: Any = None,
        role: str = "actor",
        collect: Callable[[], dict[str, Any]] | None = None,
    ) -> Staged | None:
        """Let explorers have the model's weights from shared memory; every rank calls it.

        Nothing is gathered: each rank stages its shards, and the training thread does not wait for
        the Synchronizer. An image that a save of the step staged is used again, and the other way
        round. `wait_on_save_thread` raises what could not be published.

        Args:
            global_step: the version. 0 does nothing, as in Trinity: explorers begin with it.
            synchronizer: the job's, a Ray actor; by default that of the job's root, where this
                process is in a Ray cluster. Without any, readers of this node find the version by
                the note that it leaves in the spool.
            role: whose weights these are; the Synchronizer refuses another than its own.
            collect: returns what is uploaded, by default `get_model_state`; called only if that was
                not staged before.

        Returns:
            What was staged, and the seconds that it took; None where nothing can be published.

        Raises:
            ConfigError: this manager has no coordinator yet.
            SpoolFullError: the very first image does not fit into the spool.
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
        published, staged = coordinator.upload(global_step, collect, role=role)
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
        """Note a checkpoint that was handed over; the same path in a row counts once.

        Nothing is deleted, unlike in veRL: the save may still fail. Its flow removes older steps
        once this one is committed.
        """
        if not self.previous_saved_paths or self.previous_saved_paths[-1] != new_path:
            self.previous_saved_paths.append(new_path)
        self.max_ckpt_to_keep = max_ckpt_to_keep

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Load this rank's part of a committed step, as veRL does, and continue from there.

        It is read from the spool if this node still holds it, else from disk; the log says which.
        Either way its digests are those of the manifest. veRL loads what has none. A step of
        another number of ranks is resharded, see ``reshard``.

        Args:
            local_path: ``<root>/global_step_<N>/<role>``; None does nothing. A folder of another
                job, or in veRL's layout elsewhere, is loaded as a start; a manager without a
                coordinator takes the job that it loads from for its own.
            hdfs_path: unused, as in veRL.
            del_local_after_load: remove what was downloaded; local files are never removed.

        Raises:
            ConfigError: this run has saved already: load with the manager of a new run. Or the
                step is that of another model or optimizer, which resharding sees.
            CommitError: the step is not committed, corrupted or no checkpoint. All ranks raise what
                one of them met; then another step may be loaded.
        """
        if local_path is None:
            return
        self._require(model=self.should_load_model, optimizer=self.should_load_optimizer)
        components = self._components_to_load()
        given = Path(local_path)
        folder = given.resolve()
        saved_by = run_on_all_ranks(
            folder, lambda: check_loadable(given, self.world_size, components)
        )
        begins = self._run_begun_by(folder)
        if begins:
            coordinator, step = begins
            run_on_all_ranks(folder, lambda: coordinator.check_resume(step))
        if saved_by != self.world_size:
            states = load_resharded(
                folder, saved_by, components, model=self.model, optimizer=self.optimizer
            )
            with closing(states), use_sharded_state_dicts(self.model):
                for component, state in states:
                    run_on_all_ranks(folder, partial(self._take_over, component, state))
        elif (folder.parent / MANIFEST).exists():
            self._load_committed(folder, components)
        else:
            super().load_checkpoint(str(local_path), hdfs_path, del_local_after_load)
        if begins:  # a step that cannot be loaded begins nothing, and another may be tried
            coordinator.resumed_from(step)

    def _load_committed(self, folder: Path, components: Sequence[str]) -> None:
        """Load this rank's own shards; whatever fails, on whichever rank, all ranks raise."""
        root, step, role = split_role_path(folder)
        files = [f"{role}/{shard_file(name, self.world_size, self.rank)}" for name in components]
        ours = self._coordinator is not None and self._coordinator.root == root
        spool = self._coordinator.spool if self._coordinator and ours else None
        # the model's state is copied into the live one; the optimizer keeps what it is given
        borrow = {file for file, name in zip(files, components, strict=True) if name == "model"}
        with ExitStack() as claim:
            manifest = run_on_all_ranks(folder, lambda: lease_step_on_all_ranks(folder, claim))
            shards = load_shards(root, step, files, spool=spool, borrow=borrow)
            with closing(shards), use_sharded_state_dicts(self.model):
                for component in components:
                    self._load_next(folder, component, shards)
            run_on_all_ranks(folder, lambda: require_unreplaced(root, manifest))

    def _load_next(self, folder: Path, component: str, shards: Iterator[RestoredShard]) -> None:
        state = run_on_all_ranks(folder, lambda: next(shards).state)
        run_on_all_ranks(folder, lambda: self._take_over(component, state))

    def _take_over(self, component: str, state: Any) -> None:
        """Load one component's state as veRL does."""
        if component == "model":
            result = self.model.load_state_dict(state, strict=not has_only_adapters(state))
            if result.unexpected_keys:
                raise ConfigError(
                    f"the checkpoint holds adapter weights that this model has not: "
                    f"{', '.join(result.unexpected_keys)}; give it the same LoRA settings"
                )
        elif component == "optim":
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
            SaveFailedError: one or more of them failed; the message names them.
            WeightSyncError: a version could not be published.
        """
        if self._coordinator is not None:
            self._coordinator.wait_all()
        if self._publisher is not None:
            self._publisher.wait()

    def _run_begun_by(self, role_folder: Path) -> tuple[CheckpointCoordinator, int] | None:
        """Whose run begins with a load from there, and at which step; None for another job's."""
        try:
            root, step, _ = split_role_path(role_folder)
        except ConfigError:
            return None  # a checkpoint of another layout of folders
        if self._coordinator is not None and self._coordinator.root != root:
            return None  # another job's, which this one starts from
        return self._coordinator_of(root), step

    def _components_to_load(self) -> list[str]:
        contents = {
            "model": self.should_load_model,
            "optim": self.should_load_optimizer,
            "extra_state": self.should_load_extra,
        }
        return [component for component, wanted in contents.items() if wanted]

    def _require(self, **wanted: bool) -> None:
        for part, needed in wanted.items():
            if needed and getattr(self, part) is None:
                raise ConfigError(
                    f"the checkpoint contents ask for {part!r}, but this manager was made without; "
                    f"pass {part}=... or take it out of save_contents and load_contents"
                )

    def _place(self, local_path: str, global_step: int) -> tuple[Path, str]:
        root, step, role = split_role_path(Path(local_path).resolve())
        if step != global_step:
            raise ConfigError(
                f"checkpoint path {str(local_path)!r} is that of step {step}, but global_step is "
                f"{global_step}; pass the same step in both"
            )
        return root, role

    def _coordinator_of(self, root: Path) -> CheckpointCoordinator:
        if self._coordinator is None:
            self._coordinator = CheckpointCoordinator.of_process_group(root)
        if self._coordinator.root != root:
            raise ConfigError(
                f"this manager saves the job at {self._coordinator.root}, not at {root}; "
                "make one manager and coordinator for each job"
            )
        return self._coordinator

    def _is_new(self, component: str, step: int) -> bool:
        return self._saved.get(component) != step

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
    ) -> Staged | None:
        if not states:
            return None
        metadata = metadata_folder(coordinator, role, self.model, self.processing_class)
        overlap = coordinator.settings.overlap and self.optimizer is not None
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
        )
        self._saved.update(dict.fromkeys(staged.components, step))
        if kind == "checkpoint" and staged.components:
            self._saved["checkpoint"] = step
            if export:
                self._saved["hf_model"] = step
        return staged
