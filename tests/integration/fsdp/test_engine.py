"""veRL's own engine, saving and loading through trinity_sync."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from grpo_copy.policy import Policy
from grpo_copy.task import ANSWER_LENGTH, Batch, compute_reward, draw_prompts
from transformers import Qwen2ForCausalLM
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlManager

from tests.integration.fsdp.commits import CommitsHere, coordinator_of
from tests.integration.fsdp.merged import merged
from tests.integration.fsdp.models import gathered
from tests.integration.fsdp.ranks import on_ranks
from tests.support.job import mapped_nbytes
from tests.support.states import copied, differences
from trinity_sync import CheckpointCoordinator, ConfigError, SaveFailedError, Settings, WeightReader
from trinity_sync.integrations.verl import (
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    use_trinity_sync,
)
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.ticket import lock_slot
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.weights.reader import FileRegistry

logger = logging.getLogger(__name__)


@pytest.fixture
def policy(one_rank: None, tiny: Path) -> Policy:
    return Policy(tiny)


@pytest.fixture
def new_run(one_rank: None, tmp_path: Path) -> Iterator[Callable[[], CheckpointCoordinator]]:
    """Makes the coordinator of a new run of the job."""
    with ExitStack() as runs:
        yield lambda: runs.enter_context(coordinator_of(tmp_path / "job"))


@pytest.fixture
def coordinator(new_run: Callable[[], CheckpointCoordinator]) -> CheckpointCoordinator:
    return new_run()


def batch() -> Batch:
    prompts, groups = draw_prompts(torch.Generator().manual_seed(0))
    answers = torch.randint(4, 16, (len(prompts), ANSWER_LENGTH))
    log_probs = torch.full(answers.shape, -2.5)
    return Batch(prompts, answers, log_probs, compute_reward(prompts, answers), groups, version=0)


NOT_IN_0_8 = [
    (BaseCheckpointManager, "is_lora_only_state_dict"),
    (BaseCheckpointManager, "should_load_hf_model"),
    (BaseCheckpointManager, "should_save_lora_only"),
    (VerlManager, "_has_lora"),
    (VerlManager, "_backfill_optimizer_state"),
]
"""What the managers of veRL 0.8, which Trinity-RFT needs, lack of those of 0.9.1."""


@pytest.mark.parametrize("lacking", [[], NOT_IN_0_8], ids=["0.9", "0.8"])
def test_verls_engine_saves_and_loads_through_the_manager(
    policy: Policy,
    new_run: Callable[[], CheckpointCoordinator],
    lacking: Sequence[tuple[type, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name in lacking:
        monkeypatch.delattr(owner, name)
    coordinator = new_run()
    manager = use_trinity_sync(policy.engine, coordinator)
    coordinator._stager.memory.run(looks=False)
    assert mapped_nbytes(coordinator.spool.slot("actor", "optim", 0, 0))
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
    expected = copied(gathered(policy.engine.module.state_dict()))
    folder = step_folder(coordinator.root, 7) / "actor"
    fsdp_save_state_dict(policy.engine, str(folder), 7, coordinator, logger)
    policy.train_on(batch())
    coordinator.wait_all()

    assert differences(expected, merged(folder)) == []
    assert read_latest_pointer(coordinator.root, "state_dict") == 7
    assert read_latest_pointer(coordinator.root, "checkpoint") is None


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
            assert asyncio.run(reader.wait_newer(timeout_s=250)) is not None
            assert reader.load_into(model) == step
            expected = gathered(policy.engine.module.state_dict())
            assert differences(expected, dict(model.state_dict())) == []


def test_an_engine_that_saves_without_us_cannot_upload() -> None:
    with pytest.raises(ConfigError, match="call use_trinity_sync"):
        fsdp_upload_state_dict(SimpleNamespace(), None, 1, logger)


def _start() -> None:
    from verl.workers.engine.fsdp import FSDPTurboEngineWithLMHead

    import trinity_sync.integrations.verl.switch  # noqa: F401, the switch, as veRL imports it
    from trinity_sync import ConfigError

    engine = object.__new__(FSDPTurboEngineWithLMHead)  # the package of its modules is not needed
    with pytest.raises(ConfigError, match="fsdp_turbo is not saved by trinity_sync"):
        engine._init_device_mesh()


def test_the_engine_of_fsdp_turbo_is_refused(tmp_path: Path) -> None:
    on_ranks(_start, scratch=tmp_path, world_size=1)
