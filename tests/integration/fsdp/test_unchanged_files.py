"""What FSDP2 ranks do not train is written once: bytes and inodes of real steps."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.ranks import on_ranks
from tests.support.models import configure
from trinity_sync.layout import step_folder

States = dict[str, dict[str, Any]]
"""By role and component."""
DOCUMENT = Path(__file__).parents[3] / "docs/operations/size.md"


def make_model(kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind.from_config(configure(Qwen2Config, 512, 256, inner=1024, layers=2, **more))


def shard(model: Any) -> Any:
    for layer in model.base_model.modules():
        if type(layer).__name__ == "Qwen2DecoderLayer":
            fully_shard(layer)
    return fully_shard(model)


def optimize(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def do_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


PPO = ["actor", "critic", "reference"]
TOKENS = torch.arange(16).reshape(2, 8)


def train_ppo(*, warm_up: bool) -> Iterator[States]:
    actor, reference = shard(make_model()), shard(make_model().requires_grad_(False))
    critic = shard(make_model(AutoModelForTokenClassification, num_labels=1))
    of_actor, of_critic = optimize(actor), optimize(critic)
    while True:
        do_step(of_critic, (critic(TOKENS).logits - 1).square().mean())
        if not warm_up:
            penalty = (actor(TOKENS).logits - reference(TOKENS).logits).square().mean()
            do_step(of_actor, actor(TOKENS, labels=TOKENS).loss + penalty)
        trained = {"actor": (actor, of_actor), "critic": (critic, of_critic)}
        states = {
            r: {"model": m.state_dict(), "optim": o.state_dict()} for r, (m, o) in trained.items()
        }
        yield {**states, "reference": {"model": reference.state_dict()}}


def train_lora(*, apart: bool) -> Iterator[States]:
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = shard(get_peft_model(make_model(), config))
    optimizer = optimize(model)
    while True:
        do_step(optimizer, model(TOKENS, labels=TOKENS).loss)
        whole, optim = model.state_dict(), optimizer.state_dict()
        adapter = {name: each for name, each in whole.items() if "lora_" in name}
        base = {name: each for name, each in whole.items() if name not in adapter}
        if apart:
            yield {"actor": {"model": adapter, "optim": optim}, "base": {"model": base}}
        else:
            yield {"actor": {"model": whole, "optim": optim}}


CASES: dict[str, tuple[list[str], Callable[[], Iterator[States]]]] = {
    "PPO: actor, critic, frozen reference": (PPO, lambda: train_ppo(warm_up=False)),
    "the same in the critic's warm-up": (PPO, lambda: train_ppo(warm_up=True)),
    "LoRA: adapter, and its base as a role": (["actor", "base"], lambda: train_lora(apart=True)),
    "LoRA: both in one state": (["actor"], lambda: train_lora(apart=False)),
}
STEPS = (1, 2, 3)


def save_all(folder: Path) -> None:
    """Save three steps of each case, and the last of them in a root of its own as well."""
    torch.set_num_threads(1)
    for number, (roles, train) in enumerate(CASES.values()):
        with (
            coordinator_of(folder / f"{number}/job", roles=roles) as saves,
            coordinator_of(folder / f"{number}/fresh", roles=roles) as other,
        ):
            for step, states in zip(STEPS, train(), strict=False):
                for role, components in states.items():
                    saves.save(step, components, role=role)
                    if step == STEPS[-1]:
                        other.save(step, components, role=role)


def count_written(root: Path, step: int) -> int:
    """Bytes of the files of a step that no step before it has, each once."""
    found: list[dict[int, int]] = [{}, {}]
    for each in STEPS[: STEPS.index(step) + 1]:
        for path in step_folder(root, each).rglob("*"):
            if path.is_file():
                found[each == step][path.stat().st_ino] = path.stat().st_size
    return sum(size for inode, size in found[True].items() if inode not in found[False])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(save_all, folder, scratch=folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_step_writes_what_was_trained(saved: Path, case: str) -> None:
    folder = saved / str([*CASES].index(case))
    before, after = count_written(folder / "fresh", 3), count_written(folder / "job", 3)
    row = re.search(rf"^\| {re.escape(case)} \|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    figures = f" {before / 1e6:.1f} MB | {after / 1e6:.1f} MB | {after / before:.0%} "
    assert row[1] == figures
    assert count_written(folder / "job", 2) == pytest.approx(after, rel=0.01)
