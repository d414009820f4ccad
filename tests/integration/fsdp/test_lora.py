"""LoRA: a version, and a checkpoint, of the adapter alone."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils.fsdp_utils import apply_fsdp2
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.integration.fsdp.commits import coordinator_of
from tests.support.states import copied, differences
from tests.support.weights import VersionFile, version_in
from trinity_sync import CheckpointCoordinator, ConfigError, WeightReader
from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations.verl import FSDPCheckpointManager, fsdp_save_state_dict
from trinity_sync.integrations.verl.checkpoint_engine import TrinitySyncCheckpointEngine
from trinity_sync.integrations.verl.fsdp.manager import list_sizes
from trinity_sync.integrations.verl.fsdp.state_dict import make_metadata
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.stager import estimate_nbytes
from trinity_sync.storage.discovery import require_committed

RANK, STEP = 4, 3


@dataclass
class Tuned:
    """A model with an adapter, and the manager that saves nothing else of it."""

    model: Any
    optimizer: Any
    manager: FSDPCheckpointManager
    coordinator: CheckpointCoordinator
    tiny: Path

    @property
    def path(self) -> str:
        return str(step_folder(self.coordinator.root, STEP) / "actor")

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        """A copy of the weights of the adapter."""
        return {name: value for name, value in whole(self.model).items() if "lora_" in name}


def peft_model(tiny: Path, rank: int = RANK) -> Any:
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    modules = ["q_proj", "v_proj"]
    config = LoraConfig(r=rank, lora_alpha=8, use_rslora=True, target_modules=modules)
    return get_peft_model(base, config)


def whole(model: Any) -> dict[str, torch.Tensor]:
    """A copy of whole tensors."""
    return copied({name: value.full_tensor() for name, value in model.state_dict().items()})


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy}, {})
    return model


def zero(model: Any, part: str) -> None:
    """Zero the weights with a part of a name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.zero_()


@pytest.fixture
def tuned(one_rank: None, tiny: Path, tmp_path: Path) -> Iterator[Tuned]:
    model = shard(peft_model(tiny))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-1)
    tokens = torch.arange(16).reshape(2, 8)
    for _ in range(2):  # B begins as zeros, and A has gradients once it is none
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    with coordinator_of(tmp_path / "job") as coordinator:
        manager = manager_of(model, optimizer, tiny, coordinator)
        yield Tuned(model, optimizer, manager, coordinator, tiny)


def manager_of(
    model: Any, optimizer: Any, tiny: Path, coordinator: CheckpointCoordinator
) -> FSDPCheckpointManager:
    contents = CheckpointConfig(
        save_contents=["model"], load_contents=["model"], save_lora_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    return FSDPCheckpointManager(
        model, optimizer, None, tokenizer, contents, coordinator=coordinator
    )


def test_memory_is_touched_for_the_adapter_alone(tuned: Tuned) -> None:
    adapter = sum(each.nbytes for each in tuned.adapter.values())
    whole = sum(each.nbytes for each in tuned.model.parameters())
    assert adapter <= estimate_nbytes(list_sizes(tuned.manager)["model"]) < adapter + whole // 10


class OfEightBits(torch.optim.AdamW):
    """An optimizer of another library, whose states are smaller than torch's."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OfEightBits])
def test_memory_is_touched_for_the_states_of_torchs_optimizers_alone(
    tuned: Tuned, kind: type[torch.optim.Optimizer]
) -> None:
    tuned.manager.checkpoint_save_contents = ["model", "optimizer"]
    tuned.manager.optimizer = kind([torch.nn.Parameter(torch.zeros(3))])
    assert ("optim" in list_sizes(tuned.manager)) == (kind is torch.optim.AdamW)


def test_a_version_of_the_adapter_is_loaded_into_another_one(tuned: Tuned, tmp_path: Path) -> None:
    coordinator = tuned.coordinator
    published, _ = coordinator.upload(STEP, tuned.manager.get_model_state)
    version = version_in(coordinator.spool, coordinator.root, published.run, STEP)
    explorer = peft_model(tuned.tiny)
    own = {name: value for name, value in explorer.state_dict().items() if "lora_" in name}
    assert any(value.any() for name, value in tuned.adapter.items() if "lora_B" in name)
    with WeightReader(VersionFile(tmp_path / "none"), name="explorer") as reader:
        reader.load_into(own, version)
    loaded = {name: value for name, value in explorer.state_dict().items() if name in own}
    assert differences(tuned.adapter, loaded) == []


def test_a_checkpoint_of_the_adapter_is_loaded_back(tuned: Tuned, tmp_path: Path) -> None:
    saved = tuned.adapter
    tuned.manager.save_checkpoint(tuned.path, STEP)
    tuned.manager.wait_on_save_thread()
    manifest = require_committed(tuned.coordinator.root, STEP)
    shard = torch.load(Path(tuned.path) / "model_world_size_1_rank_0.pt", weights_only=False)
    assert shard.keys() == saved.keys()
    assert "model" in {file.component for file in manifest.files}
    told = json.loads((Path(tuned.path) / "lora_train_meta.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (RANK, 8)
    export_step(tuned.coordinator.root, STEP, to=tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tuned.tiny, dtype=torch.float32)
    exported = PeftModel.from_pretrained(base, tmp_path / "out/lora_adapter").state_dict()
    assert differences(saved, {name: exported[name] for name in saved}) == []
    zero(tuned.model, "lora_")
    with coordinator_of(tmp_path / "job") as resumed:
        manager_of(tuned.model, tuned.optimizer, tuned.tiny, resumed).load_checkpoint(tuned.path)
    assert differences(saved, tuned.adapter) == []


def test_an_adapter_with_other_settings_or_shapes_is_refused_before_anything_is_loaded(
    tuned: Tuned, tmp_path: Path
) -> None:
    tuned.manager.save_checkpoint(tuned.path, STEP)
    tuned.manager.wait_on_save_thread()
    zero(tuned.model, "lora_A")
    other = shard(peft_model(tuned.tiny, rank=2 * RANK))
    adapter = tuned.model.peft_config["default"]
    for model, alpha, refused in (
        (tuned.model, 16, "lora_alpha=8, and this model's has 16"),
        (other, 8, r"actor holds another model: names or shapes of .*lora_A"),
    ):
        adapter.lora_alpha = alpha
        before = whole(model)
        with coordinator_of(tmp_path / "job") as resumed, pytest.raises(ConfigError, match=refused):
            manager_of(model, None, tuned.tiny, resumed).load_checkpoint(tuned.path)
        assert differences(before, whole(model)) == []


@pytest.mark.parametrize("merges", [False, True])
def test_verl_sends_no_rollout_the_base_without_the_adapter(
    tuned: Tuned, tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch, merges: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)  # of veRL's device
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    policy: Any = SimpleNamespace(
        module=tuned.model,
        model_config=SimpleNamespace(lora={"merge": merges}, hf_config=tuned.model.config),
        engine_config=SimpleNamespace(mixed_precision=None),
        _uses_fsdp2_cpu_offload_policy=False,
        _is_offload_param=False,
        _qat_enabled=False,
    )
    policy._merged_lora_per_tensor_param = partial(FSDPEngine._merged_lora_per_tensor_param, policy)
    weights, _ = FSDPEngine.get_per_tensor_param(policy)
    engine = TrinitySyncCheckpointEngine(is_master=True, root=tmp_path / "sent")
    refused = pytest.raises(ConfigError, match=r"base_layer.weight is published without .*lora.mer")
    with nullcontext() if merges else refused:
        asyncio.run(engine.send_weights(weights, global_steps=1))
    assert engine._get_sender()._newest == (1 if merges else None)


def test_a_trained_head_is_not_left_out_of_a_checkpoint_of_the_adapter(
    one_rank: None, tiny: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config = LoraConfig(r=RANK, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW(model.parameters())
    with coordinator_of(tmp_path / "job") as coordinator:
        manager = manager_of(model, optimizer, tiny, coordinator)
        path = step_folder(coordinator.root, STEP) / "actor"
        with pytest.raises(ConfigError, match=r"save_lora_only leaves out .*lm_head.*unset it"):
            manager.save_checkpoint(str(path), STEP)


def test_a_head_that_is_not_tied_is_in_the_step_with_a_config_that_says_so(
    one_rank: None, tiny: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for is_tied in (True, False):
        model.config.tie_word_embeddings = True
        head = (
            model.model.embed_tokens.weight
            if is_tied
            else torch.nn.Parameter(model.lm_head.weight.detach() * 2)
        )
        model.lm_head.weight = head
        path = tmp_path / f"{is_tied}.json"
        path.write_bytes(make_metadata(model, None)["huggingface/config.json"])
        assert AutoConfig.from_pretrained(path).tie_word_embeddings == is_tied
        assert model.config.tie_word_embeddings


def test_a_sync_by_the_disk_is_of_the_adapter_alone(tuned: Tuned) -> None:
    engine = SimpleNamespace(
        module=tuned.model, checkpoint_manager=tuned.manager, is_param_offload_enabled=False
    )
    logger = logging.getLogger(__name__)
    fsdp_save_state_dict(engine, tuned.path, STEP, tuned.coordinator, logger)
    tuned.manager.wait_on_save_thread()
    shard = torch.load(Path(tuned.path) / "model_world_size_1_rank_0.pt", weights_only=False)
    assert shard.keys() == tuned.adapter.keys()


def test_an_adapter_that_is_not_there_is_an_error_and_not_a_save_of_something_else(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {"model.norm.weight": torch.ones(3)}
    monkeypatch.setattr(
        "trinity_sync.integrations.verl.fsdp.manager.get_model_state_to_stage", lambda _: without
    )
    with pytest.raises(ConfigError, match="none of the model's 1 weights is an adapter's"):
        tuned.manager.save_checkpoint(tuned.path, STEP)
    with pytest.raises(ConfigError, match="none of the model's 1 weights is an adapter's"):
        tuned.manager.upload_state_dict(STEP)
