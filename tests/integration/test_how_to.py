"""Pages of how-tos and operations: their commands, on a job ``ckpts`` with some steps."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.test_get_started import PROGRAM
from tests.integration.test_tutorials import REPOSITORY, make_tools, run_in_one_shell
from tests.support.states import differences
from trinity_sync import CheckpointCoordinator
from trinity_sync.stack.services import StackState

PAGES = (
    "how-to/export.md",
    "how-to/remote.md",
    "how-to/retention.md",
    "operations/monitor.md",
    "operations/troubleshooting.md",
    "operations/verify.md",
)
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_a_training_starts_from_files_of_torch_and_of_dcp(
    stack: StackState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    programs = dict(PROGRAM.findall((REPOSITORY / "docs/how-to/migrate.md").read_text()))
    assert [*programs] == ["from_torch.py", "from_dcp.py"]
    for name, text in programs.items():
        (folder := tmp_path / name).mkdir()
        monkeypatch.chdir(folder)
        torch.save({**states, "step": 40}, "old.pt")
        dcp.save(states, checkpoint_id="old", no_dist=True)
        exec(compile(text, name, "exec"), {})
        with CheckpointCoordinator(folder / "ckpts") as saves:
            assert differences(saves.load(40), states) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_they_are_written(
    page: str, stack: StackState, tmp_path: Path
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointCoordinator(tmp_path / "ckpts") as saves:
        for step in range(10, 70, 10):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            saves.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    commands = BLOCK.findall((REPOSITORY / "docs" / page).read_text())
    bucket = (tmp_path / "bucket").as_uri()
    commands = [each.replace("s3://bucket", bucket) for each in commands]
    run_in_one_shell(commands, tmp_path, make_tools(tmp_path))
