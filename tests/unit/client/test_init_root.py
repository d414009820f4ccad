"""Ranks on several nodes begin a job in one and the same root, or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.command import invoke
from tests.support.forked import Program
from tests.support.job import Job
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.init_root import resolve_root
from trinity_sync.errors import ConfigError
from trinity_sync.layout import step_folder
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.settings import Settings
from trinity_sync.storage.job_settings import write_job_settings

RANK = """
import json, os, sys
import torch.distributed as dist
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import TrinitySyncError
from trinity_sync.settings import Settings
from trinity_sync.client import init_root
init_root.VISIBLE_S, init_root.ROUND_S = 0.5, 0.01
rank, meeting, spool, waits_for, *roots = sys.argv[1:]
gather, rounds = dist.all_gather_object, 0
def counted(*given):
    global rounds
    rounds += 1
    if rank == "1" and root == roots[-1] and rounds == 3:
        open(waits_for, "w").close()
    gather(*given)
dist.all_gather_object = counted
dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=2)
said = []
for root in roots:
    rounds = 0
    try:
        settings = Settings(node=f"node-{rank}", spool=f"{spool}/{rank}", home=spool)
        named = {"settings": settings, "require_stack": root.endswith("needs a stack")}
        saves = CheckpointCoordinator.of_process_group(root, **named)
        said.append([type(saves).__name__, [place.node for place in saves._places]])
        saves.close()
    except TrinitySyncError as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
dist.destroy_process_group()
"""


def test_nodes_that_share_a_root_begin_and_disks_of_their_own_are_refused_on_all_ranks(
    tmp_path: Path, spool_folder: Path
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    own.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*alone, f"mount -t tmpfs none {own}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a process may have no mounts of its own here")
    slow = tmp_path / "slow"  # rank 0 waits for its store until rank 1 has met it several times
    waits_for = tmp_path / "far/global_step_1/manifest.json"
    waits_for.parent.mkdir(parents=True)
    os.mkfifo(waits_for)
    write_job_settings(slow, {"remote": f"file://{tmp_path}/far", "remote_required": True})
    (own / "loop").symlink_to(own / "loop")  # on rank 0's disk alone
    roots = [str(shared), str(own), "/proc/none", "s3://bucket/job", str(own / "loop")]
    roots.append(str(shared / "needs a stack"))
    given = [str(path) for path in (tmp_path / "meeting", spool_folder, waits_for)]
    first, second = (
        [str(rank), *given, *roots, str(named), str(slow)]
        for rank, named in enumerate([shared, tmp_path / "elsewhere"])  # as a relative path may
    )
    command = [*alone, f'mount -t tmpfs none {own} && exec "$@"', "sh", sys.executable, "-c", RANK]
    with subprocess.Popen([*command, *second], stdout=subprocess.PIPE, text=True) as rank_1:
        one = json.loads(Program(RANK, *first).end())
        other = json.loads(rank_1.communicate(timeout=250)[0])
    assert one == other
    assert one[0] == ["CheckpointCoordinator", ["node-0", "node-1"]]
    kind, why = one[1]
    assert (kind, f"node node-1 does not see in {own} (tmpfs" in why) == ("RootError", True)
    assert "copy its steps to a remote" in why
    assert [kind for kind, _ in one[2:4]] == ["ConfigError", "ConfigError"]
    assert [kind for kind, _ in one[4:6]] == ["ConfigError", "PrefectApiError"]
    assert "loop" in one[4][1]
    assert "no Prefect server is known" in one[5][1]
    assert [kind for kind, _ in one[6:]] == ["RootError", "RemoteError"]
    assert "rank 1 on node node-1 has the root" in one[6][1]
    assert sorted(path.name for path in own.iterdir()) == [".trinity_sync", "loop"]


@pytest.mark.parametrize("by", ["its path", "a link"])
@pytest.mark.parametrize("below", ["", "new", "actor"])
def test_a_step_is_written_into_no_folder_of_a_step(
    job: Job, tmp_path: Path, spool_folder: Path, by: str, below: str
) -> None:
    job.commit_states(30, {"model": {"w": torch.ones(9)}})
    replicate(job.root, f"file://{tmp_path}/copies", 30)
    inside = step_folder(job.root, 30) / below
    if by == "a link":
        (tmp_path / "link").symlink_to(step_folder(job.root, 30))
        inside = tmp_path / "link" / below
    before = sorted(job.root.rglob("*"))
    for write in (
        lambda: CheckpointCoordinator(inside, settings=Settings(spool=spool_folder)),
        lambda: fetch(f"file://{tmp_path}/copies", 30, inside),
        lambda: Checkpoints(inside).record_metrics(30, {"reward": 1.0}),
    ):
        with pytest.raises(ConfigError, match=r"pass the root|is not a folder"):
            write()
    done = invoke("jobs", "set", inside, "keep=last=3")
    assert done.exit_code == 2, done.output
    assert sorted(job.root.rglob("*")) == before


def test_a_root_that_the_file_system_refuses_is_an_error_of_the_root(tmp_path: Path) -> None:
    for root in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "global_step_5"):
        with pytest.raises(ConfigError, match="cannot create the job's root"):
            resolve_root(root)


def test_a_root_may_have_the_name_of_a_step_or_be_one_inside_of_it(
    job: Job, tmp_path: Path
) -> None:
    assert resolve_root(tmp_path / "other/global_step_5").is_dir()
    own = step_folder(job.root, 30) / "own"
    (own / ".trinity_sync").mkdir(parents=True)
    assert resolve_root(own) == own


@pytest.mark.parametrize(
    "command",
    [
        ("jobs", "set", "", "keep=last=3"),
        ("metrics", "", "30", "a=1"),
        ("prune", "--keep", "last=1", ""),
        ("ls", "--limit", "1", ""),
    ],
)
def test_an_empty_root_is_not_the_folder_that_one_is_in(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert (done.exit_code, "the root is empty" in done.stderr) == (2, True)
    with pytest.raises(ConfigError, match="the root is empty"):
        resolve_root("")
    assert not any(tmp_path.iterdir())
    done = invoke("jobs", "set", ".", "keep=last=3")
    assert done.exit_code == 0, done.output
