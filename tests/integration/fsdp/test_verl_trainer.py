"""What veRL's own trainers do around a checkpoint, with ours in its place: their real methods."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from grpo_copy.policy import Policy
from omegaconf import DictConfig, OmegaConf
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.runtime_env.runtime_env import _merge_runtime_env
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer import config as verl_config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tracking
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlManager

from tests.conftest import environment
from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold, Fails
from tests.integration.fsdp.models import manager_of
from tests.support.job import mapped_nbytes
from tests.support.waiting import until
from trinity_sync import (
    CheckpointCoordinator,
    Checkpoints,
    CommitError,
    ConfigError,
    SaveFailedError,
)
from trinity_sync.integrations.verl.driver import (
    add_methods,
    wrap_find_latest_ckpt_path,
    wrap_fit,
    wrap_get_ppo_ray_runtime_env,
    wrap_load_checkpoint,
    wrap_log,
    wrap_save_checkpoint,
)
from trinity_sync.integrations.verl.fsdp.manager import TrainerCheckpointManager
from trinity_sync.layout import attaching_folder, step_folder, steps_on_disk
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.runs import list_runs
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

DEFAULTS = Path(verl_config.__file__).parent / "_generated_ppo_trainer.yaml"


class Workers:
    """veRL's worker group of one worker, in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any, step: int, max_ckpt_to_keep: Any
    ) -> None:
        self.engine.save_checkpoint(local_path, hdfs_path, step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self.engine.load_checkpoint(local_path, None, del_local_after_load)


add_methods(Workers)


class Seen(CheckpointCallback):
    """Notes what a callback of the user finds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, bool, int]] = []

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **more: Any) -> None:
        submitted = trainer.actor_rollout_wg.engine.checkpoint_manager.previous_global_step
        self.seen.append((global_step, checkpoint_dir, more["async_save"], submitted))


@pytest.fixture(scope="module")
def defaults() -> DictConfig:
    """What veRL is configured with unless told otherwise."""
    loaded = OmegaConf.load(DEFAULTS)
    assert isinstance(loaded, DictConfig)
    return loaded


@pytest.fixture
def config(root: Path, defaults: DictConfig) -> DictConfig:
    """veRL's own defaults, for a job at ``root``."""
    config = defaults.copy()
    config.trainer.default_local_dir = str(root)
    config.actor_rollout_ref.actor.strategy = "fsdp2"
    return config


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """A TransferQueue on a Ray node of its own."""
    import transfer_queue

    with tempfile.TemporaryDirectory(prefix="trinity_sync-ray-", dir="/tmp") as scratch:
        node = {"num_cpus": 4, "object_store_memory": 100_000_000, "include_dashboard": False}
        ray.init("local", _temp_dir=scratch, log_to_driver=False, **node)
        transfer_queue.init()
        yield transfer_queue
        transfer_queue.close()
        ray.shutdown()


Start = Callable[..., Any]


@pytest.fixture
def start(policy: Policy, config: DictConfig, root: Path, spool_folder: Path) -> Iterator[Start]:
    """Makes what a new run of the trainer has when it comes to its checkpoints."""
    coordinators = []

    def make(kind: type = PPOTrainer, trigger: CommitsHere | None = None) -> Any:
        coordinator = CheckpointCoordinator(root, trigger=trigger or CommitsHere())
        coordinators.append(coordinator)
        engine = policy.engine
        engine.checkpoint_manager = manager_of(
            TrainerCheckpointManager, engine, coordinator=coordinator
        )

        class Trainer(kind):  # type: ignore[misc]
            _load_checkpoint = wrap_load_checkpoint(kind._load_checkpoint)
            _save_checkpoint = wrap_save_checkpoint(kind._save_checkpoint)

            def _setup(self) -> None: ...

        Trainer.__abstractmethods__ = frozenset()
        trainer = object.__new__(Trainer)
        trainer.config, trainer.global_steps, trainer.use_critic = config, 0, False
        trainer.trainer_mode = "sync"
        trainer.actor_rollout_wg = Workers(engine)
        trainer.train_dataloader = StatefulDataLoader(list(range(100)), batch_size=1)
        trainer.checkpoint_callback = Seen()
        trainer.max_steps_duration = 1.0
        return trainer

    with environment({"TRINITY_SYNC_SPOOL": str(spool_folder)}):
        yield make
        for coordinator in coordinators:
            coordinator.close()


@pytest.fixture
def resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers look for checkpoints with ours, as `integrations.verl.switch` has them do."""
    found = wrap_find_latest_ckpt_path(find_latest_ckpt_path)
    monkeypatch.setattr(trainer_base, "find_latest_ckpt_path", found)


def train_to(trainer: Any, step: int) -> Iterator[Any]:
    """Draw ``step`` batches, and save."""
    batches = iter(trainer.train_dataloader)
    for _ in range(step - trainer.global_steps):
        next(batches)
    trainer.global_steps = step
    trainer._save_checkpoint()
    return batches


def resume(start: Start, step: int) -> Any:
    """Make a new run, which begins at a step."""
    resumed = start()
    resumed._load_checkpoint()
    assert resumed.global_steps == step
    return resumed


def wait(trainer: Any) -> None:
    trainer.actor_rollout_wg.async_calls_finalize_fn_exec(blocking=True)


def commit_steps(trainer: Any, *steps: int) -> None:
    for step in steps:
        train_to(trainer, step)
        wait(trainer)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(PPOTrainer, "fsdp2"), (RayPPOTrainer, "veomni"), (RayPPOTrainer, "megatron")],
)
def test_the_iteration_file_is_left_to_the_commit(
    start: Start, root: Path, config: DictConfig, kind: type, strategy: str
) -> None:
    config.actor_rollout_ref.actor.strategy = strategy  # that is all the driver knows of the engine
    trigger = CommitsWhenTold()
    trainer = start(kind, trigger)
    train_to(trainer, 1)
    assert config.trainer.default_local_dir == str(root)
    assert not step_folder(root, 1).exists()  # which the trainer would write its files to
    assert read_latest_pointer(root, "checkpoint") is None
    trigger.go()
    wait(trainer)
    assert read_latest_pointer(root, "checkpoint") == 1
    assert require_committed(root, 1).find_file("data.pt")


def test_a_resumed_run_has_the_newest_commit_and_its_dataloader(
    start: Start, resuming: None, root: Path, policy: Policy
) -> None:
    commit_steps(start(), 3)
    before = policy.fingerprint()
    resumed = resume(start, 3)
    assert policy.fingerprint() == before
    assert next(iter(resumed.train_dataloader)).item() == 3


@pytest.mark.parametrize("kind", [PPOTrainer, RayPPOTrainer])
def test_what_is_logged_of_a_saved_step_decides_which_step_is_the_best(
    start: Start, root: Path, kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tracking.Tracking, "log", wrap_log(tracking.Tracking.log))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    logger = tracking.Tracking("project", "experiment", ["file"])
    trainer = start(kind)
    accuracy = "val-core/openai/gsm8k/acc/mean@1"
    for step, value in ((1, 0.2), (2, 0.7), (3, 0.4)):
        train_to(trainer, step)
        logger.log({accuracy: value, "timing_s/step": float(step), "name": "a"}, step)
    logger.log({accuracy: 0.9}, 4)  # is not saved
    wait(trainer)
    steps = Checkpoints(root)
    until(lambda: steps.metrics(3), "the thread has written them")
    assert steps.metrics(2) == {accuracy: 0.7, "timing_s/step": 2.0}
    assert steps.metrics(4) == {}
    rules = Rules.of_job(read_job_settings(root), keep=f"last=1,best=1:{accuracy}:max")
    assert [each.step for each in plan_prune(root, rules, time.time()).removed] == [1]


class Killed(BaseException):
    """Ends a trainer where a SIGKILL might."""


def test_the_files_of_a_killed_driver_are_in_no_step_and_those_of_a_commit_are_resumed_from(
    start: Start, resuming: None, root: Path, config: DictConfig, queue: Any, tmp_path: Path
) -> None:
    def start_at(step: int) -> Any:
        config.trainer.resume_mode = "resume_path" if step else "auto"
        config.trainer.resume_from_path = str(step_folder(root, step))
        trainer = start()
        trainer.trainer_mode = "separate_async"
        trainer._load_checkpoint()
        return trainer

    def put(key: str) -> None:
        if before := prompts_in(queue):
            queue.kv_clear(keys=[*before], partition_id="train")
        tag = {"is_prompt": True, "status": "pending"}
        queue.kv_put(key=key, partition_id="train", fields={"x": torch.ones(3)}, tag=tag)

    first = start_at(0)
    for step in (1, 2):
        put(f"of step {step}")
        train_to(first, step)
        wait(first)
    files = {path: path.read_bytes() for path in step_folder(root, 2).rglob("*") if path.is_file()}
    named = {record.path for record in require_committed(root, 2).files}
    assert {"data.pt", "transfer_queue/controller_state.pkl"} <= named

    second = start_at(1)
    assert prompts_in(queue) == {"of step 1"}

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    second.actor_rollout_wg.save_checkpoint = die
    put("of the killed run")
    with pytest.raises(Killed):
        train_to(second, 2)
    assert len([*attaching_folder(root).rglob("data.pt")]) == 1  # the driver had written its files
    found = [path for path in step_folder(root, 2).rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in found} == files
    (verified,) = judge_steps(check_files(choose_files(root, step=2)))
    assert (verified.state, verified.wrong) == ("valid", "")

    url = f"file://{tmp_path}/remote"
    replicate(root, url, 2)
    shutil.rmtree(step_folder(root, 2))
    fetch(url, 2, root)
    start_at(2)
    assert prompts_in(queue) == {"of step 2"}

    (storage,) = step_folder(root, 2).glob("transfer_queue/*/su_0_*.pkl")
    storage.write_bytes(storage.read_bytes()[:-1] + b"!")
    with pytest.raises(CommitError, match=f"{storage} is corrupted"):
        start_at(2)


class SavesItself:
    """A worker group whose engine is not trinity_sync's."""

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "weights.pt").write_bytes(b"of the critic")


def test_what_a_critic_saves_that_is_not_ours_is_part_of_the_commit(
    start: Start, root: Path, config: DictConfig
) -> None:
    config.critic.strategy = "torchtitan"
    trainer = start(RayPPOTrainer)
    trainer.use_critic, trainer.critic_wg = True, SavesItself()
    commit_steps(trainer, 1)
    assert require_committed(root, 1).find_file("critic/weights.pt")
    assert (step_folder(root, 1) / "critic/weights.pt").read_bytes() == b"of the critic"


def prompts_in(queue: Any) -> set[str]:
    return {*(queue.kv_list("train") or {}).get("train", {})}


@pytest.mark.parametrize("kind", [PPOTrainer, RayPPOTrainer])
def test_a_step_of_another_job_is_an_initial_state_and_begins_no_run_there(
    start: Start, root: Path, policy: Policy, kind: type, config: DictConfig
) -> None:
    commit_steps(start(), 3)
    before, own = policy.fingerprint(), root / "of another job"
    second = start(kind)
    manager = policy.engine.checkpoint_manager
    manager._coordinator = None  # as veRL makes it
    config.trainer.update({"default_local_dir": str(own), "resume_mode": "resume_path"})
    config.trainer.resume_from_path = str(step_folder(root, 3))
    second._load_checkpoint()
    assert policy.fingerprint() == before
    assert len(list_runs(root)) == 1
    manager.save_checkpoint(str(step_folder(own, 4) / "actor"), global_step=4)
    assert [(run.number, run.resumed_from) for run in list_runs(own)] == [(1, 0)]
    manager._coordinator.close(timeout=0)
    assert len(list_runs(root)) == 1


def test_a_root_that_is_a_link_on_a_workers_node_alone_is_the_same_job(
    start: Start, root: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver tells the path as its own node resolves it."""
    commit_steps(start(), 3)
    second, link = start(), root.parent / "link"
    manager = policy.engine.checkpoint_manager
    manager._coordinator = None  # as veRL makes it
    link.symlink_to(root)
    second.actor_rollout_wg.call_checkpoint_manager("set_root", link)
    second.actor_rollout_wg.load_checkpoint(str(step_folder(link, 3) / "actor"), False)
    second.actor_rollout_wg.call_checkpoint_manager("prewarm", link, "actor")
    manager._coordinator.close(timeout=0)
    assert [(run.number, run.resumed_from) for run in list_runs(root)] == [(1, 0), (2, 3)]
    assert "Saves will be slow" not in caplog.text


def test_a_resume_waits_for_what_the_run_before_submitted(
    start: Start, resuming: None, policy: Policy
) -> None:
    trigger = CommitsWhenTold()
    train_to(start(trigger=trigger), 2)
    threading.Timer(0.5, trigger.go).start()
    resume(start, 2)


def save_with_verl(policy: Policy, root: Path, step: int) -> None:
    """Save as veRL does without us."""
    manager = manager_of(VerlManager, policy.engine)
    manager.save_checkpoint(str(step_folder(root, step) / "actor"), global_step=step)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_job_that_verl_began_goes_on_with_us_also_if_its_first_run_commits_nothing(
    start: Start, resuming: None, root: Path, policy: Policy
) -> None:
    save_with_verl(policy, root, 2)
    for _ in range(2):
        resumed = resume(start, 2)
    commit_steps(resumed, 3)
    assert read_latest_pointer(root, "checkpoint") == 3


def test_a_checkpoint_that_verl_saved_after_ours_is_resumed_from(
    start: Start, resuming: None, root: Path, policy: Policy
) -> None:
    commit_steps(start(), 1)
    save_with_verl(policy, root, 2)
    resume(start, 2)


def test_a_folder_with_a_dataloaders_position_alone_is_no_checkpoint_of_verl(
    start: Start, resuming: None, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit_steps(start(), 1)
    step_folder(root, 2).mkdir()
    (step_folder(root, 2) / "data.pt").write_bytes(b"of a save that was lost")
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = resume(start, 1)
    assert "names step 2, and the newest commit is step 1" in caplog.text
    commit_steps(resumed, 2)
    assert find_latest_ckpt_path(str(root)) == str(step_folder(root, 2))


def test_an_iteration_file_that_was_set_back_is_said_to_have_no_effect(
    start: Start, resuming: None, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit_steps(start(), 1, 2)
    start()._load_checkpoint()
    assert "and the newest commit is" not in caplog.text
    (root / "latest_checkpointed_iteration.txt").write_text("1\n")
    resume(start, 2)
    assert "names step 1, and the newest commit is step 2" in caplog.text
    assert f"run: trinity-sync rewind {root} 1" in caplog.text


def test_a_save_because_the_machine_goes_soon_waits_for_its_commit(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 30))
    trigger = CommitsWhenTold()
    trainer = start(RayPPOTrainer, trigger)
    threading.Timer(0.5, trigger.go).start()
    train_to(trainer, 1)
    assert read_latest_pointer(root, "checkpoint") == 1


def test_a_callback_of_the_user_comes_after_the_save_is_submitted(start: Start, root: Path) -> None:
    trainer = start()
    train_to(trainer, 1)
    assert trainer.checkpoint_callback.seen == [(1, str(step_folder(root, 1)), True, 1)]
    wait(trainer)


def test_a_training_ends_with_the_failure_of_a_save(start: Start, spool_folder: Path) -> None:
    trainer = start()

    def train(self: Any) -> str:
        train_to(self, 1)
        return "trained"

    assert wrap_fit(train)(trainer) == "trained"

    with pytest.raises(SaveFailedError, match="the disk is full"):
        wrap_fit(train)(start(trigger=Fails()))


def test_the_memory_of_a_first_save_is_touched_beside_the_first_steps(
    start: Start, policy: Policy, config: DictConfig
) -> None:
    trainer = start()
    trainer.use_critic, trainer.critic_wg = True, trainer.actor_rollout_wg
    coordinator = policy.engine.checkpoint_manager._coordinator
    slots = [
        (coordinator.spool.slot(role, name, 0, 0), times)  # Adam's two tensors a parameter
        for role in ("actor", "critic")
        for name, times in (("model", 1), ("optim", 2))
    ]
    wrap_fit(lambda _: None)(trainer)  # a trainer that saves nothing
    coordinator._stager.memory.run(looks=False)
    assert not any(slot.exists() for slot, _ in slots)
    config.trainer.save_freq = 5

    def train(trainer: Any) -> None:
        whole = sum(each.nbytes for each in policy.engine.module.parameters())
        for slot, times in slots:
            until(lambda slot=slot, n=times: mapped_nbytes(slot) >= n * whole, slot.name)

    wrap_fit(train)(trainer)


def test_a_training_goes_on_where_no_memory_can_be_touched(
    start: Start, config: DictConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    config.trainer.update({"save_freq": 5, "default_local_dir": str(tmp_path / "of another job")})
    assert wrap_fit(lambda _: "trained")(trainer) == "trained"
    assert "Saves will be slow, or fail: this manager saves the job at" in caplog.text


def test_a_trainer_of_another_strategy_saves_as_ever(start: Start, config: DictConfig) -> None:
    trainer = start()
    config.actor_rollout_ref.actor.strategy = "torchtitan"
    order: list[str] = []

    def save(self: Any) -> None:
        order.append("save")

    wrap_save_checkpoint(save)(trainer)
    assert order == ["save"]
    assert config.actor_rollout_ref.actor.checkpoint.async_save is False


@pytest.mark.parametrize(
    ("of_actor", "of_critic", "kept"),
    [(1, 1, {3}), (1, 2, {2, 3}), (None, 1, {1, 2, 3}), (1, -1, {1, 2, 3}), (None, None, {3})],
)
def test_a_step_is_kept_while_actor_or_critic_keeps_it(
    start: Start,
    root: Path,
    config: DictConfig,
    monkeypatch: pytest.MonkeyPatch,
    of_actor: int,
    of_critic: int,
    kept: set[int],
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_ROLES", "actor,critic")
    config.trainer.max_actor_ckpt_to_keep = of_actor
    config.trainer.max_critic_ckpt_to_keep = of_critic
    config.trainer.remove_previous_ckpt_in_save = of_critic is None  # as older scripts say it
    config.critic.strategy = "fsdp2"
    trigger = CommitsHere()
    trainer = start(RayPPOTrainer, trigger)
    actor, engine = trainer.actor_rollout_wg.engine.checkpoint_manager, SimpleNamespace()
    critic = manager_of(TrainerCheckpointManager, trainer.actor_rollout_wg.engine)
    critic._coordinator = actor._coordinator
    engine.save_checkpoint = lambda path, _, step, keep: critic.save_checkpoint(
        path, global_step=step, max_ckpt_to_keep=keep
    )
    trainer.use_critic, trainer.critic_wg = True, Workers(engine)
    commit_steps(trainer, 1, 2, 3)
    trigger.finish()
    assert {*steps_on_disk(root)} == kept


def test_a_launch_tells_its_processes_the_run_the_roles_and_no_secret(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SLOTS", "3")
    monkeypatch.setenv("TRINITY_SYNC_STACK__CATALOG__URL", "postgresql://user:secret@host/db")
    monkeypatch.setenv("TRINITY_SYNC_NODE", "this-one")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    launch = wrap_get_ppo_ray_runtime_env(get_ppo_ray_runtime_env)
    with_critic, grpo = config.copy(), config.copy()
    grpo.algorithm.adv_estimator = "grpo"
    first, second = (launch(each)["env_vars"] for each in (with_critic, grpo))
    assert first["TRINITY_SYNC_ROLES"] == "actor,critic"
    assert "TRINITY_SYNC_ROLES" not in second
    assert first["TRINITY_SYNC_RUN_KEY"] != second["TRINITY_SYNC_RUN_KEY"]
    assert first["TRINITY_SYNC_SLOTS"] == "3"
    assert first["TRINITY_SYNC_ROOT"] == config.trainer.default_local_dir
    assert first["VERL_USE_EXTERNAL_MODULES"] == "mine,trinity_sync.integrations.verl.switch"
    assert "secret" not in str(first)
    assert "TRINITY_SYNC_NODE" not in first  # of the launching node alone


def test_a_launch_sets_no_variable_that_the_job_submitted_to_ray_has(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SLOTS", "3")
    modules = "trinity_sync.integrations.verl.switch,mine"
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", modules)
    job = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": modules, "TRINITY_SYNC_SLOTS": "3"}}
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": job}))
    launch = wrap_get_ppo_ray_runtime_env(get_ppo_ray_runtime_env)(config)
    merged = _merge_runtime_env(job, launch)
    assert merged is not None  # for which Ray refuses to start
    assert merged["env_vars"]["VERL_USE_EXTERNAL_MODULES"] == modules
    assert merged["env_vars"]["TRINITY_SYNC_ROOT"] == config.trainer.default_local_dir


def test_the_root_of_a_launch_is_that_of_its_trainer_and_no_other_is_accepted(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = wrap_get_ppo_ray_runtime_env(get_ppo_ray_runtime_env)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRINITY_SYNC_ROOT", raising=False)
    config.trainer.default_local_dir = "ckpts"
    assert launch(config)["env_vars"]["TRINITY_SYNC_ROOT"] == str(tmp_path / "ckpts")
    monkeypatch.setenv("TRINITY_SYNC_ROOT", "./ckpts")
    assert launch(config)["env_vars"]["TRINITY_SYNC_ROOT"] == str(tmp_path / "ckpts")
    monkeypatch.setenv("TRINITY_SYNC_ROOT", "/data/another")
    with pytest.raises(ConfigError, match=r"TRINITY_SYNC_ROOT is /data/another, .* is ckpts"):
        launch(config)


def test_the_fully_async_trainer_is_refused_at_its_launch() -> None:
    launched = subprocess.run(
        [sys.executable, "-m", "verl.experimental.fully_async_policy.fully_async_main"],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "trinity_sync.integrations.verl.switch"},
        capture_output=True,
        text=True,
    )
    assert launched.returncode
    assert "ConfigError: verl.experimental.fully_async_policy does not work" in launched.stderr
