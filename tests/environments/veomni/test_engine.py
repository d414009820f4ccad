"""veRL's VeOmni engine itself on CPU ranks, with the switch, in an environment of its own.

The reference of a load is what the ranks that saved had, gathered with PyTorch alone.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import differences
from trinity_sync import ConfigError
from trinity_sync.formats.hf_export import export_step
from trinity_sync.layout import step_folder
from trinity_sync.tensors.dtensors import adopt_meshes

pytest.importorskip("veomni", reason="VeOmni has an environment of its own; see make veomni")
pytestmark = pytest.mark.timeout(600)

STEP = 3
REPLICAS = {"fsdp": -1, "hsdp": 2}
"""``fsdp_size`` of an engine: ranks that shard, of those of a mesh."""


def make_engine(model: Path, mesh: str = "fsdp", **settings: Any) -> Any:
    """Build the engine as veRL's workers do, with the switch."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, VeOmniEngineConfig, VeOmniOptimizerConfig
    from verl.workers.engine.veomni.transformer_impl import VeOmniEngineWithLMHead

    import tests.environments.verl.cpu  # noqa: F401, veRL on the CPU
    import trinity_sync.integrations.verl.switch  # noqa: F401, as veRL imports it

    torch.set_num_threads(1)
    optimizer = settings.pop("optimizer", "adamw")
    engine = VeOmniEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(model), use_remove_padding=False, enable_gradient_checkpointing=False
        ),
        engine_config=VeOmniEngineConfig(
            strategy="veomni",
            attn_implementation="sdpa",
            moe_implementation="eager",
            fsdp_size=REPLICAS[mesh],
            use_remove_padding=False,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            mixed_precision=False,
            **settings,
        ),
        optimizer_config=VeOmniOptimizerConfig(
            optimizer=optimizer, lr=1e-2, lr_warmup_steps=10, total_training_steps=100
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def train(engine: Any, seed: int) -> None:
    """Take an optimizer step with the losses of random tokens."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 16, (2, 8), generator=random)
    engine.module(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
    engine.optimizer_step()
    engine.optimizer_zero_grad()
    engine.lr_scheduler_step()


def whole(engine: Any) -> dict[str, Any]:
    """Gather model and optimizer with PyTorch, and copy the schedule."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(engine.module, engine.optimizer, options=options)
    schedule = engine.lr_scheduler.state_dict()
    return {"model": model, "optim": optimizer, "schedule": {**schedule}}


def save(model: Path, root: Path, mesh: str) -> bool:
    """Train and save; tensors change right after the call. Return whether the manager is ours."""
    from trinity_sync.integrations.verl.fsdp.manager import FSDPCheckpointManager

    engine = make_engine(model, mesh)
    manager = engine.checkpoint_manager
    manager._coordinator = coordinator_of(root)
    for step in range(1, STEP + 1):
        train(engine, step)
    expected = whole(engine)
    if dist.get_rank() == 0:
        torch.save(expected, root.parent / "expected.pt")
    engine.save_checkpoint(str(step_folder(root, STEP) / "actor"), global_step=STEP)
    train(engine, 7)
    manager.wait_on_save_thread()
    manager._coordinator.close()
    return isinstance(manager, FSDPCheckpointManager)


def load(model: Path, root: Path, mesh: str, ours: bool) -> list[str]:
    """Load into an engine with another state; return what differs from the reference."""
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    engine = make_engine(model, mesh)
    train(engine, 9)
    known = engine.checkpoint_manager
    if ours:
        known._coordinator = coordinator_of(root)
    else:
        engine.checkpoint_manager = FSDPCheckpointManager(
            known.model, known.optimizer, known.lr_scheduler, None, engine.checkpoint_config
        )
    engine.load_checkpoint(str(step_folder(root, STEP) / "actor"), del_local_after_load=False)
    if ours:
        known._coordinator.close()
    else:  # the mesh in the file is that of the first replica, where PyTorch gathers nothing here
        adopt_meshes([dict(each) for each in engine.optimizer.state.values()])
    return differences(torch.load(root.parent / "expected.pt", weights_only=False), whole(engine))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2."""
    from grpo_copy.model import create_model

    return create_model(tmp_path_factory.mktemp("model") / "tiny")


SAVED = {"fsdp": 2, "hsdp": 4}
LOADS = [("fsdp", "fsdp", 2), ("hsdp", "hsdp", 4), ("fsdp", "hsdp", 4), ("hsdp", "fsdp", 2)]


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of what two ranks saved, and four that shard over two."""
    roots = {}
    for mesh, ranks in SAVED.items():
        folder = tmp_path_factory.mktemp(mesh)
        roots[mesh] = folder / "ckpts"
        assert all(on_ranks(save, model, roots[mesh], mesh, scratch=folder, world_size=ranks))
    return roots


@pytest.mark.parametrize(("mesh", "to", "ranks"), LOADS)
def test_an_engine_that_loads_a_step_has_its_state_bit_for_bit(
    model: Path, saved: dict[str, Path], tmp_path: Path, mesh: str, to: str, ranks: int
) -> None:
    found = on_ranks(load, model, saved[mesh], to, True, scratch=tmp_path, world_size=ranks)
    assert found == [[]] * ranks


@pytest.mark.parametrize("mesh", SAVED)
def test_verls_own_manager_loads_a_step(
    model: Path, saved: dict[str, Path], tmp_path: Path, mesh: str
) -> None:
    ranks = SAVED[mesh]
    found = on_ranks(load, model, saved[mesh], mesh, False, scratch=tmp_path, world_size=ranks)
    assert found == [[]] * ranks


@pytest.mark.parametrize("mesh", SAVED)
def test_a_step_is_exported(saved: dict[str, Path], mesh: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export_step(saved[mesh], STEP, to=tmp_path / "hf")
    expected = torch.load(saved[mesh].parent / "expected.pt", weights_only=False)["model"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert differences({name: expected[name] for name in found}, found) == []
    assert expected.keys() - found.keys() <= {"lm_head.weight"}  # tied


def start_refused(model: Path, settings: dict[str, Any]) -> str:
    """Return why an engine with settings does not start."""
    try:
        make_engine(model, **settings)
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.fixture(scope="module")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random mixture of four experts, with the tokenizer of the other model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.support.models import configure

    folder = tmp_path_factory.mktemp("experts") / "tiny"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = configure(Qwen3MoeConfig, 32, 16, head_dim=8, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("settings", [{"expert_parallel_size": 2}, {"optimizer": "muon"}])
def test_expert_parallelism_and_muon_are_refused_when_the_engine_starts(
    experts: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for error in on_ranks(start_refused, experts, settings, scratch=tmp_path):
        assert "set expert_parallel_size=1 and optim.optimizer=adamw" in error
