"""veRL's own engine, saving and loading through trinity_sync."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from grpo_copy.policy import Policy
from grpo_copy.task import ANSWER_LENGTH, Batch, compute_reward, draw_prompts
from transformers import Qwen2ForCausalLM

from tests.integration.fsdp.commits import CommitsHere
from tests.integration.fsdp.merged import merged
from tests.integration.weights.conftest import ray_node as ray_node
from tests.support.waiting import until
from trinity_sync import (
    CheckpointCoordinator,
    ConfigError,
    SaveFailedError,
    Settings,
    Synchronizer,
    WeightReader,
)
from trinity_sync.integrations.verl import (
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    use_trinity_sync,
)
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.ticket import lock_slot
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.weights.file_registry import FileRegistry

logger = logging.getLogger(__name__)


@pytest.fixture
def policy(one_rank: None, tiny: Path) -> Policy:
    return Policy(tiny)


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[[], CheckpointCoordinator]]:
    """Makes the coordinator of a new run of the job."""
    settings = Settings(spool=tmp_path / "spool")
    with ExitStack() as runs:
        yield lambda: runs.enter_context(
            CheckpointCoordinator(tmp_path / "job", settings=settings, trigger=CommitsHere())
        )


@pytest.fixture
def coordinator(new_run: Callable[[], CheckpointCoordinator]) -> CheckpointCoordinator:
    return new_run()


def batch() -> Batch:
    prompts, groups = draw_prompts(torch.Generator().manual_seed(0))
    answers = torch.randint(4, 16, (len(prompts), ANSWER_LENGTH))
    log_probs = torch.full(answers.shape, -2.5)
    return Batch(prompts, answers, log_probs, compute_reward(prompts, answers), groups, version=0)


def test_verls_engine_saves_and_loads_through_the_manager(
    policy: Policy, new_run: Callable[[], CheckpointCoordinator]
) -> None:
    coordinator = new_run()
    manager = use_trinity_sync(policy.engine, coordinator)
    same = batch()
    policy.train_on(same)
    folder = str(step_folder(coordinator.root, 1) / "actor")
    policy.engine.save_checkpoint(folder, global_step=1, max_ckpt_to_keep=2)
    before = policy.fingerprint()
    loss = policy.train_on(same)
    manager.wait_on_save_thread()

    use_trinity_sync(policy.engine, new_run())
    policy.engine.load_checkpoint(folder)
    assert policy.fingerprint() == before
    assert policy.train_on(same) == loss


def test_fsdp_save_state_dict_commits_the_weights_of_the_call(
    policy: Policy, coordinator: CheckpointCoordinator
) -> None:
    policy.train_on(batch())
    expected = {k: v.full_tensor().clone() for k, v in policy.engine.module.state_dict().items()}
    folder = step_folder(coordinator.root, 7) / "actor"
    fsdp_save_state_dict(policy.engine, str(folder), 7, coordinator, logger)
    policy.train_on(batch())
    coordinator.wait_all()

    saved = merged(folder)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert read_latest_pointer(coordinator.root, "state_dict") == 7
    assert read_latest_pointer(coordinator.root, "checkpoint") is None


def test_a_sync_brings_the_files_that_the_merger_needs(
    policy: Policy, coordinator: CheckpointCoordinator
) -> None:
    folder = step_folder(coordinator.root, 1) / "actor"
    fsdp_save_state_dict(policy.engine, str(folder), 1, coordinator, logger)
    coordinator.wait_all()
    manifest = read_manifest(coordinator.root, 1)
    assert manifest is not None
    names = {record.path for record in manifest.files}
    assert {"actor/fsdp_config.json", "actor/huggingface/config.json"} <= names
    assert "actor/huggingface/tokenizer.json" in names


def test_a_sync_that_could_not_be_staged_is_not_logged_as_submitted(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(spool=tmp_path / "spool", slots=1, slot_wait_s=0.1)
    saves = CheckpointCoordinator(tmp_path / "job", settings=settings, trigger=CommitsHere())

    def sync(step: int) -> None:
        folder = str(step_folder(saves.root, step) / "actor")
        fsdp_save_state_dict(policy.engine, folder, step, saves, logger)

    with closing(saves), caplog.at_level(logging.INFO, logger.name):
        sync(1)
        saves.wait_all()
        (slot,) = saves.spool.folder.glob("actor.model.*.slot")
        write_job_settings(saves.root, {"rank_timeout_s": 1})  # what commits awaits the image
        with lock_slot(slot):
            sync(2)
        with pytest.raises(SaveFailedError, match="step 2"):
            saves.wait_all()
    assert "weights of step 1 submitted" in caplog.text
    assert "weights of step 2" not in caplog.text


def test_fsdp_save_state_dict_without_a_path_does_nothing(
    policy: Policy, coordinator: CheckpointCoordinator
) -> None:
    assert fsdp_save_state_dict(policy.engine, None, 1, coordinator, logger) is None


def test_fsdp_save_state_dict_refuses_a_path_of_another_step(
    policy: Policy, coordinator: CheckpointCoordinator
) -> None:
    folder = str(step_folder(coordinator.root, 1) / "actor")
    with pytest.raises(ConfigError, match="is that of step 1, but global_step is 2"):
        fsdp_save_state_dict(policy.engine, folder, 2, coordinator, logger)


def test_an_uploaded_model_is_loaded_without_ray(
    policy: Policy, coordinator: CheckpointCoordinator, tiny: Path
) -> None:
    assert not ray.is_initialized()
    use_trinity_sync(policy.engine, coordinator)
    registry = FileRegistry(coordinator.root, settings=coordinator.settings)
    model = Qwen2ForCausalLM.from_pretrained(tiny)
    with WeightReader(registry, name="explorer") as reader:
        for step in (1, 2):
            policy.train_on(batch())
            assert fsdp_upload_state_dict(policy.engine, None, step, logger) is not None
            assert asyncio.run(reader.wait_newer(timeout_s=30)) is not None
            assert reader.load_into(model) == step
            expected, found = policy.engine.module.state_dict(), model.state_dict()
            assert all(torch.equal(found[n], v.full_tensor()) for n, v in expected.items())


def test_an_uploaded_model_is_loaded_by_an_explorer(
    policy: Policy, coordinator: CheckpointCoordinator, ray_node: None, tiny: Path
) -> None:
    synchronizer = Synchronizer.get_actor(root=coordinator.root, namespace="engine")
    manager = use_trinity_sync(policy.engine, coordinator)
    reader = WeightReader(synchronizer, name="explorer")
    model = Qwen2ForCausalLM.from_pretrained(tiny)

    def require_loaded(step: int) -> None:
        assert asyncio.run(reader.wait_newer(timeout_s=30)) is not None
        assert reader.load_into(model) == step
        expected = policy.engine.module.state_dict()
        found = model.state_dict()
        assert all(torch.equal(found[n], v.full_tensor()) for n, v in expected.items())

    assert fsdp_upload_state_dict(policy.engine, synchronizer, 0, logger) is None
    policy.train_on(batch())
    manager.save_checkpoint(str(step_folder(coordinator.root, 1) / "actor"), 1)
    staged = fsdp_upload_state_dict(policy.engine, synchronizer, 1, logger)
    assert staged.nbytes == 0  # the save's image
    require_loaded(1)

    policy.train_on(batch())
    uploaded = manager.upload_state_dict(2, synchronizer=synchronizer)
    assert uploaded.nbytes > 0
    folder = step_folder(coordinator.root, 2) / "actor"
    saved = manager.save_state_dict(str(folder), 2)
    assert saved.nbytes < uploaded.nbytes  # metadata alone
    require_loaded(2)
    manager.wait_on_save_thread()
    committed, found = merged(folder), model.state_dict()
    assert all(torch.equal(committed[name], found[name]) for name in committed)

    def served() -> set[tuple[str, int]]:
        return {(each.name, each.step) for each in ray.get(synchronizer.readers.remote())}

    assert until(lambda: ("explorer", 2) in served(), "word of the reader", 30)
    ray.kill(synchronizer)


def test_an_engine_that_saves_without_us_cannot_upload(ray_node: None) -> None:
    with pytest.raises(ConfigError, match="call use_trinity_sync"):
        fsdp_upload_state_dict(SimpleNamespace(), None, 1, logger)
