"""A real vLLM reloads the folders that a rollout-side process publishes while a trainer goes on."""

from pathlib import Path
from typing import Any

import torch

from tests.environments.vllm.engines import expect, generate, make_model, running_engine
from trinity_sync import CheckpointCoordinator, FolderReader, WeightFolder, WeightReader


def train(policy: Any, step: int) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(-1)[step::3] += 0.3 * torch.randn(())


def test_vllm_answers_as_transformers_with_each_published_folder(
    trainer: CheckpointCoordinator, tmp_path: Path
) -> None:
    policy = make_model(0)
    policy.save_pretrained(tmp_path / "model")
    folder = WeightFolder(tmp_path / "out", tmp_path / "model", deltas=2, max_shard_bytes=50_000)
    local = WeightFolder(tmp_path / "local", tmp_path / "model")  # of another host
    remote, answers, bases = FolderReader(tmp_path / "out"), [], []
    with (
        running_engine(tmp_path / "model") as llm,
        WeightReader(root=tmp_path / "ckpts", name="folder") as reader,
    ):
        assert generate(llm) == expect(policy)
        for step in range(1, 5):
            train(policy, step)
            trainer.upload(step, policy.state_dict)
            published = folder.publish(reader)
            assert published.step == step
            bases.append(published.base)
            version = local.publish(remote)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(version.folder)})
            llm.reset_prefix_cache()
            answers.append(generate(llm))
            assert answers[-1] == expect(policy)
    assert bases == [None, 1, 2, None]
    assert len({str(answer) for answer in answers}) == 4
