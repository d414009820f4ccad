"""Pages of how-tos and operations: their commands, on a job ``ckpts`` with some steps."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.test_get_started import PROGRAM
from tests.integration.test_tutorials import REPOSITORY, make_tools, run_in_one_shell
from tests.support.states import differences
from trinity_sync import CheckpointCoordinator, Checkpoints
from trinity_sync.stack.services import StackState

PAGES = (
    "how-to/export.md",
    "how-to/remote.md",
    "how-to/retention.md",
    "operations/monitor.md",
    "operations/troubleshooting.md",
    "operations/verify.md",
)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def save_steps(root: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointCoordinator(root) as saves:
        for step in range(10, 70, 10):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            saves.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})


def run_commands_of(page: str, folder: Path, tools: dict[str, str]) -> None:
    """Run the commands of a page on a job of six steps, with a folder for its bucket."""
    commands = BLOCK.findall((REPOSITORY / "docs" / page).read_text())
    bucket = (folder / "bucket").as_uri()
    commands = [each.replace("s3://bucket", bucket) for each in commands]
    run_in_one_shell(commands, folder, tools)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_they_are_written(
    page: str, stack: StackState, tmp_path: Path
) -> None:
    save_steps(tmp_path / "ckpts")
    run_commands_of(page, tmp_path, make_tools(tmp_path))


@pytest.fixture
def client(tools: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user without a stack, also of this process."""
    for name in ("TRINITY_SYNC_HOME", "TRINITY_SYNC_SPOOL", "TRINITY_SYNC_SAVER"):
        monkeypatch.setenv(name, tools[name])
    return tools


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_without_a_stack(
    page: str, client: dict[str, str], tmp_path: Path
) -> None:
    save_steps(tmp_path / "ckpts")
    run_commands_of(page, tmp_path, client)


@pytest.mark.slow
def test_the_python_of_the_page_of_readers_runs_without_a_stack(
    client: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_steps(tmp_path / "ckpts")
    publish, follow, evaluate, _ = PYTHON.findall(
        (REPOSITORY / "docs/how-to/read-weights.md").read_text()
    )
    model, own = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with CheckpointCoordinator("ckpts") as saves:
        saves.load("latest")
        exec(publish, names := {"saves": saves, "step": 70, "model": model})
    exec(follow, names)

    async def follow_until_loaded() -> None:
        following = asyncio.create_task(names["follow"](own))
        while differences(own.state_dict(), model.state_dict()):
            await asyncio.sleep(0.05)
            assert not following.done()
        following.cancel()

    asyncio.run(follow_until_loaded())
    exec(evaluate, names)
    names["evaluate_newest"](own, lambda _: 0.5)
    newest = Checkpoints("ckpts").latest_step()
    assert Checkpoints("ckpts").metrics(newest) == {"reward": 0.5}
