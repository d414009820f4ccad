"""Steps that veRL's manager saved on ranks of FSDP are merged as their shards by hand."""

from pathlib import Path

import pytest
import torch

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.merged import merged
from tests.integration.fsdp.models import Trained
from tests.integration.fsdp.ranks import on_ranks
from trinity_sync import Checkpoints
from trinity_sync.formats.hf_export import export_step
from trinity_sync.formats.merge import merge_steps
from trinity_sync.layout import step_folder

STEPS = (1, 2, 3)


def _train(version: int, tiny: Path, root: Path) -> None:
    trained = Trained(tiny, version)
    coordinator = coordinator_of(root)
    manager = trained.manager(coordinator)
    for step in STEPS:
        trained.step()
        manager.save_checkpoint(str(step_folder(root, step) / "actor"), step)
        manager.wait_on_save_thread()
    coordinator.close()


@pytest.mark.parametrize(
    ("version", "ranks"), [(1, 2), (2, 2), (2, 4)], ids=["FSDP1", "FSDP2", "FSDP2 of 4"]
)
def test_a_merge_of_ranks_equals_a_mean_in_float64(
    version: int, ranks: int, tiny: Path, tmp_path: Path
) -> None:
    root, out = tmp_path / "job", tmp_path / "merges"
    on_ranks(_train, version, tiny, root, scratch=tmp_path, world_size=ranks)
    merge_steps(root, "last=3", out, weights=[1, 2, 5])
    sources = [merged(step_folder(root, step) / "actor") for step in STEPS]
    first, second, third = ({n: t.double() for n, t in each.items()} for each in sources)
    expected = {n: first[n] / 8 + second[n] / 4 + third[n] * 5 / 8 for n in first}
    found = {name: torch.empty_like(tensor) for name, tensor in sources[0].items()}
    Checkpoints(out).load_into(3, found)
    assert all(torch.equal(found[name], expected[name].float()) for name in found)
    assert not any(torch.equal(found[name], sources[2][name]) for name in found if "proj" in name)
    assert "model.safetensors" in export_step(out, 3).files
