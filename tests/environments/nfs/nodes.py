"""Two nodes, each with a kernel's NFS client of its own, and one root.

A client keeps what it knows of a folder for up to a minute. So a test lets a node look before the
other one changes anything.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.environments.nfs.conftest import Node
from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.support.steps import MODEL, commit_files
from trinity_sync.client import init_root
from trinity_sync.client.function_runner import FunctionRunner
from trinity_sync.client.init_root import require_capabilities
from trinity_sync.errors import CommitError, ConfigError, RootError, SupersededError
from trinity_sync.fs.locks import acquire_commit_lock, acquire_file_lock
from trinity_sync.integrations.verl.fsdp.state_dict import check_loadable
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.retention import prune as prune_module
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.saves.journal import Journal, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import find_newest, read_latest_pointer, require_committed
from trinity_sync.storage.gc import empty_trash, remove_replaced
from trinity_sync.storage.job_settings import is_replicated, record_replicated, write_job_settings
from trinity_sync.storage.manifest import read_run_manifest
from trinity_sync.storage.metrics import read_metrics, write_metrics
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.replace import quarantine_folder, replacing_folder
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import list_runs, open_run
from trinity_sync.storage.save_functions import FunctionStatus, read_statuses
from trinity_sync.storage.steps_in_use import (
    acquire_removal_lock,
    lease_to_read,
    list_leases,
    pin,
    resolve_step,
    tag,
)
from trinity_sync.storage.uncommitted import Written
from trinity_sync.storage.verify import check_files, choose_files, judge_steps
from trinity_sync.weights.committed import CommitNotification
from trinity_sync.weights.versions import Version

SHARE = "/mnt/nfs"
N = 1_000_000
pytestmark = pytest.mark.skipif(not os.path.ismount(SHARE), reason="runs by `make nfs`")


@pytest.fixture
def mount_without_plus() -> Iterator[Path]:
    """A mount of the share that sees no change in a folder while it lists another one."""
    folder = Path(SHARE).with_name("without-plus")
    folder.mkdir()
    mount(folder, "nordirplus")
    yield folder
    run_unpacked("umount", str(folder))
    folder.rmdir()


@pytest.fixture
def gate(spool_folder: Path) -> Path:
    """A pipe: an open of it waits for the other end, across nodes of this machine."""
    os.mkfifo(spool_folder / "gate")
    return spool_folder / "gate"


@pytest.fixture
def cut_off() -> Iterator[Node]:
    """Another process of the other node, whose network is to be gone for a while."""
    node = Node("two")
    yield node
    node.network("up")
    node.kill()


def commit_steps(root: Path, *steps: int) -> None:
    for step in steps:
        commit_files(root, step)


def keep_last(number: int) -> Rules:
    return Rules(parse_policy(f"last={number}"), parse_policy(f"last={number}"))


def removed_by(root: Path, rules: Rules) -> list[int]:
    done = prune(root, plan_prune(root, rules, time.time()))
    return [each.step for each in done.removed]


def look_at(root: Path) -> list[Any]:
    """What a node that is asked this has in its caches afterwards."""
    seen = [list_leases(root), list_runs(root), find_newest(root)]
    seen += [read_run_manifest(root, 1, step) for step in range(1, 10)]
    return [list(root.rglob("*")), seen]


def write_shard(
    root: Path, spool: Path, step: int, fill: float, *, run: int = 1, rank: int = 0, ranks: int = 1
) -> list[Written]:
    """Save the model of one rank on the node that this is called on, up to the commit."""
    job = Job(root, open_job_spool(spool, root), ranks)
    job.stage(step, {"model": {"w": torch.full((N,), fill)}}, run=run, rank=rank)
    share = NodeShards(f"node-{rank}", str(job.spool.folder), {"actor": (rank,)})
    try:
        return persist(share, job.save(step, run=run), "model", WriteOptions(rank_timeout_s=0.05))
    finally:
        job.stagers[rank].close()


def save_of(root: Path, step: int, run: int = 1) -> SaveId:
    return SaveId(str(root), run, "", step, "checkpoint", ("actor",))


def assert_holds(root: Path, step: int, *fills: float) -> None:
    """That the step loads, each rank with what it was filled with."""
    for rank, fill in enumerate(fills):
        state = load_states(root, step, "actor", rank=rank, world_size=len(fills))
        assert torch.equal(state["model"]["w"], torch.full((N,), fill))


def read_on_until(root: Path, last: int) -> list[int]:
    """Look for the newest step again and again, and read what was found, digests compared."""
    seen: list[int] = []
    while not seen or seen[-1] < last:
        found = find_newest(root)
        if found is None or (seen and found.step == seen[-1]):
            continue
        try:
            with lease_to_read(root, found.step, "reader"):
                assert_holds(root, found.step, found.step)
        except CommitError:  # removed before it was leased
            continue
        seen.append(found.step)
    return seen


def begin_together(root: Path, spool: Path, rank: int) -> list[str]:
    """The nodes of the ranks of a job, as each finds them at its start."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    settings = Settings(node=f"node-{rank}", spool=spool / str(rank), home=spool / "home")
    dist.init_process_group("gloo", f"file://{spool}/meeting", rank=rank, world_size=2)
    try:
        # a key with a random part, for which no lock is held to the end of this process
        places, _ = init_root.open_together(root, settings, "0" * 32)
    finally:
        dist.destroy_process_group()
    return [place.node for place in places]


def hold_the_lock(root: Path, told: Path) -> None:
    with acquire_commit_lock(root):
        told.touch()
        time.sleep(3600)


def next_commit(root: Path, gate: Path) -> tuple[bool, Version | None]:
    """Whether a commit after the gate opens is noticed without a scan, and the newest then."""
    notification = CommitNotification(root, "actor")
    before = None, notification.read_signature()
    gate.read_bytes()
    after = asyncio.run(notification.wait_for_change(before))
    return after != before, notification.find_newest(list_runs(root))


def tell(root: Path, message: str) -> None:
    """Write into the journal that a save is in work, or why it failed."""
    request = SaveRequest(root=str(root), step=1, run=1)
    append(request, "failed" if message else "begun", message)


def time_behind(gate: Path) -> float:
    """What time it is once the other end of the pipe was opened and closed."""
    gate.read_bytes()
    return time.time()


def prune_behind(gate: Path, root: Path, planned: RemovalPlan) -> None:
    """Prune, once the other end of the pipe was opened and closed after the look at leases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune_module, "_find_save_in_flight", lambda *_: gate.read_text())
        prune(root, planned)


def serve(threads: int) -> None:
    """Have so many threads of the server; with none it is gone."""
    run_unpacked("nsenter", "-t", "1", "--net", "--mount", "rpc.nfsd", "-N", "3", str(threads))


def mount(folder: Path, option: str) -> None:
    run_unpacked("mount.nfs4", "10.0.1.1:/", str(folder), "-o", f"vers=4.2,{option}")


def run_unpacked(*command: str) -> None:
    """Run a command of the packages that the machine has."""
    libraries = os.environ["BUILD"] + "/unpacked/usr/lib/x86_64-linux-gnu"
    subprocess.run(command, check=True, env=os.environ | {"LD_LIBRARY_PATH": libraries})


def test_a_root_on_nfs_can_do_all_that_a_commit_needs(root: Path) -> None:
    found = require_capabilities(root)
    assert found.mount.kind == "nfs4"
    assert found.mount.shared
    assert not any(each.reason for each in found.each)


def test_ranks_on_two_nodes_begin_together(
    root: Path, spool_folder: Path, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sees at once what the other has made, and does not get its lock."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(init_root, "VISIBLE_S", 5.0)
    other.begin(begin_together, root, spool_folder, 1)
    assert begin_together(root, spool_folder, 0) == other.end() == ["node-0", "node-1"]


def test_a_node_of_rank_0_that_sees_late_is_refused(
    root: Path, spool_folder: Path, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    folder = Path(SHARE).with_name("by-options")
    folder.mkdir()
    mount(folder, "nocto")
    other.call(mount, folder, "cto")
    there = folder / root.relative_to(SHARE)
    try:
        other.begin(begin_together, there, spool_folder, 1)
        for begun in (partial(begin_together, there, spool_folder, 0), other.end):
            with pytest.raises(RootError, match=r"node node-0 has mounted .* the option nocto"):
                begun()
    finally:
        run_unpacked("umount", str(folder))
        other.call(run_unpacked, "umount", str(folder))
        folder.rmdir()


def test_a_lease_taken_on_one_node_holds_on_the_other(root: Path, other: Node) -> None:
    commit_steps(root, 1, 2, 3)
    with acquire_lease(root, 3, "one of this node"):
        look_at(root)
        lease = other.call(acquire_lease, root, 1, "explorer")
        assert removed_by(root, keep_last(1)) == [2]
    other.call(lease.__exit__, None, None, None)
    assert removed_by(root, keep_last(1)) == [1]


@pytest.mark.parametrize("claim", [pin, partial(acquire_lease, holder="explorer")])
def test_the_first_claim_of_a_job_is_seen_by_a_node_that_had_found_none(
    root: Path, other: Node, claim: Callable[..., Any]
) -> None:
    commit_steps(root, 1, 2, 3)
    with acquire_commit_lock(root), acquire_removal_lock(root):
        pass  # their files are known here
    planned = plan_prune(root, keep_last(1), time.time())
    other.call(claim, root, 1)
    assert [each.step for each in prune(root, planned).removed] == [2]


def test_a_step_is_known_as_ours_as_soon_as_the_other_node_has_committed_it(
    root: Path, other: Node
) -> None:
    """Otherwise a rank takes it for another system's, of which the files are all there is."""
    role_folder = root / "global_step_1/actor"
    role_folder.mkdir(parents=True)
    assert read_run_manifest(root, 1, 1) is None
    other.call(commit_files, root, 1)
    other.call(os.unlink, root / "global_step_1" / MODEL)
    assert check_loadable(role_folder, 1, ["model"]) == 1  # by the manifest; its load says more


def test_a_tag_is_not_taken_from_the_step_that_the_other_node_gave_it(
    root: Path, other: Node
) -> None:
    commit_steps(root, 1, 2)
    tag(root, 1, "first")
    with pytest.raises(ConfigError, match="neither"):
        resolve_step(root, "best")
    other.call(tag, root, 1, "best")
    with pytest.raises(ConfigError, match="best is at step 1"):
        tag(root, 2, "best")
    other.call(partial(tag, force=True), root, 2, "best")
    assert resolve_step(root, "best") == 2


def test_metrics_of_two_nodes_come_together(root: Path, other: Node) -> None:
    write_metrics(root, 1, 1, {"reward": 0.5})
    assert read_metrics(root, 1, 2) == {}
    other.call(write_metrics, root, 1, 2, {"reward": 0.9})
    assert read_metrics(root, 1, 2) == {"reward": 0.9}
    other.call(write_metrics, root, 1, 2, {"length": 7.0})
    write_metrics(root, 1, 2, {"loss": 2.0})
    assert read_metrics(root, 1, 2) == {"reward": 0.9, "length": 7.0, "loss": 2.0}


def test_what_one_node_writes_into_the_journal_is_read_on_the_other(
    root: Path, other: Node
) -> None:
    request = SaveRequest(root=str(root), step=1, run=1)
    (root / ".trinity_sync").mkdir(exist_ok=True)
    journal = Journal.of(request)
    journal.read()
    assert journal.find(request.key) is None
    for message, state in (("", "begun"), ("the disk is full", "failed")):
        other.call(tell, root, message)
        journal.read()
        entry = journal.find(request.key)
        assert (entry.state, entry.message) == (state, message)


def test_a_step_is_known_to_be_stored_as_soon_as_the_other_node_has_noted_it(
    root: Path, other: Node
) -> None:
    url = "file:///store"
    write_job_settings(root, {"remote": url, "remote_required": True})
    commit_steps(root, 1, 2)
    first, second = require_committed(root, 1), require_committed(root, 2)
    record_replicated(root, url, first)
    assert not is_replicated(root, second)
    other.call(record_replicated, root, url, second)
    assert is_replicated(root, second)


def test_a_step_that_lost_its_name_on_the_other_node_is_put_back(
    root: Path, other: Node, mount_without_plus: Path
) -> None:
    """There a process died between the two renames that stand for an exchange."""
    commit_files(root, 1)
    here = mount_without_plus / root.relative_to(SHARE)
    fresh = replacing_folder(root) / "global_step_1"
    fresh.mkdir(parents=True)
    assert [each.state for each in remove_replaced(here)] == ["repaired"]
    fresh.mkdir()
    look_at(here)
    other.call(os.rename, root / "global_step_1", fresh.with_name("global_step_1.replaced"))
    assert [each.state for each in remove_replaced(here)] == ["repaired", "repaired"]
    assert require_committed(here, 1)


def test_no_lease_is_given_for_a_step_that_the_other_node_has_removed(
    root: Path, other: Node
) -> None:
    commit_steps(root, 1, 2)
    other.call(look_at, root)
    assert removed_by(root, keep_last(1)) == [1]
    with pytest.raises(CommitError, match="is not committed"):
        other.call(acquire_lease, root, 1, "explorer")


def test_a_run_that_begins_on_one_node_leaves_those_of_the_other_behind(
    root: Path, spool_folder: Path, other: Node
) -> None:
    old = open_run(root, "old", 0)
    written = write_shard(root, spool_folder, 1, 1.0)
    look_at(root)
    new = other.call(open_run, root, "new", 0)
    assert (old.number, new.number) == (1, 2)
    with pytest.raises(SupersededError):
        commit(save_of(root, 1), written)
    assert open_run(root, "new", 0) == new


def test_a_step_committed_on_one_node_is_known_on_the_other(
    root: Path, spool_folder: Path, other: Node
) -> None:
    commit_files(root, 1)
    other.call(look_at, root)
    commit(save_of(root, 2), write_shard(root, spool_folder, 2, 2.0))
    assert other.call(find_newest, root).step == 2
    assert other.call(read_latest_pointer, root, "checkpoint") == 2
    other.call(assert_holds, root, 2, 2.0)


@pytest.mark.parametrize("step", [1, 2], ids=["that was there", "that is new"])
def test_a_commit_of_a_step_on_one_node_is_noticed_on_the_other(
    step: int, root: Path, gate: Path, other: Node
) -> None:
    commit_files(root, 1)
    other.begin(next_commit, root, gate)
    with gate.open("w"):  # it has looked
        pass
    commit_files(root, step)
    is_noticed, version = other.end()
    assert is_noticed
    assert version.step == step


def test_a_later_run_on_the_other_node_finds_the_step_that_is_in_its_place(
    root: Path, spool_folder: Path, other: Node
) -> None:
    open_run(root, "old", 0)
    written = write_shard(root, spool_folder / "one", 1, 1.0)
    theirs = other.call(partial(write_shard, run=2), root, spool_folder / "two", 1, 2.0)
    other.call(look_at, root)
    commit(save_of(root, 1), written)
    assert other.call(open_run, root, "new", 0).number == 2
    other.call(commit, save_of(root, 1, 2), theirs)
    assert require_committed(root, 1).run == 2
    assert_holds(root, 1, 2.0)
    assert list(quarantine_folder(root).rglob("global_step_1")), "it was written over"


def test_a_step_that_the_other_node_has_committed_again_is_not_removed_by_an_old_plan(
    root: Path, spool_folder: Path, other: Node
) -> None:
    open_run(root, "old", 0)
    commit_steps(root, 1, 2, 3)
    old = plan_prune(root, keep_last(1), time.time())
    look_at(root)
    run = other.call(open_run, root, "new", 0).number
    theirs = other.call(partial(write_shard, run=run), root, spool_folder, 2, 2.0)
    look_at(root)
    other.call(commit, save_of(root, 2, run), theirs)
    done = prune(root, old)
    assert [each.step for each in done.removed] == [1]
    assert require_committed(root, 2).run == run
    assert_holds(root, 2, 2.0)


def test_ranks_on_two_nodes_make_one_step(root: Path, spool_folder: Path, other: Node) -> None:
    look_at(root)
    write = partial(write_shard, ranks=2)
    theirs = other.call(partial(write, rank=1), root, spool_folder / "two", 1, 2.0)
    commit(save_of(root, 1), [*write(root, spool_folder / "one", 1, 1.0), *theirs])
    for node in (lambda act, *args: act(*args), other.call):
        node(assert_holds, root, 1, 1.0, 2.0)
    assert [each.state for each in judge_steps(check_files(choose_files(root, step=1)))] == [
        "valid"
    ]


def test_a_file_that_is_removed_while_it_is_open_is_none_of_a_save_functions(
    root: Path, spool_folder: Path
) -> None:
    folder, spool = root / "global_step_1", open_job_spool(spool_folder, root)
    folder.mkdir()
    with ExitStack() as open_still:

        def save() -> None:
            (folder / "kept").touch()
            open_still.enter_context((folder / "removed").open("x"))
            (folder / "removed").unlink()

        begun = FunctionStatus("save", 1, 1, "checkpoint", 0, "1/1")
        FunctionRunner(root, spool).call(save, begun)
        assert list(folder.glob(".nfs*"))
    (receipt,) = read_statuses(spool, save_of(root, 1))
    assert receipt.files == ("kept",)


def test_a_step_that_the_other_node_has_fetched_is_not_fetched_again(
    root: Path, tmp_path: Path, other: Node
) -> None:
    store, new = f"file://{tmp_path}/store", tmp_path / "new"
    commit_files(root, 1)
    replicate(root, store, 1)
    with acquire_file_lock(new / ".trinity_sync/fetching.lock"):
        pass  # its file is known here
    assert not (new / "global_step_1").exists()
    fetched = other.call(fetch, store, 1, new)
    assert fetched[1]
    assert fetch(store, 1, new) == (fetched[0], False)


def test_a_step_that_is_read_without_a_lease_is_removed_when_it_is_closed(root: Path) -> None:
    commit_steps(root, 1, 2)
    with (root / "global_step_1" / MODEL).open("rb") as file:
        assert removed_by(root, keep_last(1)) == [1]
        (left,) = empty_trash(root)
        assert (left.state, "reads it" in left.why) == ("left", True)
        assert len(file.read()) == 1000
    assert removed_by(root, keep_last(1)) == []
    assert list((root / ".trinity_sync/trash").iterdir()) == []


def test_what_replaced_a_step_and_is_still_read_is_left_and_said_once(root: Path) -> None:
    commit_files(root, 1)
    folder = replacing_folder(root) / "global_step_1"
    folder.mkdir(parents=True)
    with (folder / "read").open("x"):
        assert [each.state for each in remove_replaced(root)] == ["left"]
    assert [each.state for each in remove_replaced(root)] == ["repaired"]


def test_a_reader_on_the_other_node_has_whole_steps_while_old_steps_are_removed(
    root: Path, spool_folder: Path, other: Node
) -> None:
    last = 12
    other.call(look_at, root)
    other.begin(read_on_until, root, last)
    for step in range(1, last + 1):
        commit(save_of(root, step), write_shard(root, spool_folder / str(step), step, step))
        removed_by(root, keep_last(2))
    seen = other.end()
    assert seen == sorted({*seen})
    assert len(seen) > 2


def test_a_node_that_is_cut_off_keeps_its_lock_no_longer_than_the_server_lets_it(
    root: Path, spool_folder: Path, tmp_path: Path, cut_off: Node
) -> None:
    written = write_shard(root, spool_folder, 1, 1.0)
    cut_off.begin(hold_the_lock, root, tmp_path / "held")
    while not (tmp_path / "held").exists():
        time.sleep(0.1)
    cut_off.network("down")
    commit(save_of(root, 1), written)
    assert_holds(root, 1, 1.0)


def test_a_node_that_was_cut_off_in_a_commit_leaves_alone_what_was_committed_since(
    root: Path, spool_folder: Path, gate: Path, cut_off: Node
) -> None:
    open_run(root, "old", 0)
    old = cut_off.call(write_shard, root, spool_folder / "two", 1, 1.0)
    cut_off.begin(partial(commit, clock=partial(time_behind, gate)), save_of(root, 1), old)
    with gate.open("w"):
        cut_off.network("down")
        run = open_run(root, "new", 0).number
        new = write_shard(root, spool_folder / "one", 1, 2.0, run=run)
        commit(save_of(root, 1, run), new)
        cut_off.network("up")
    with pytest.raises(CommitError, match="lost the lock"):
        cut_off.end()
    assert require_committed(root, 1).run == run
    assert_holds(root, 1, 2.0)


def test_a_node_that_was_cut_off_in_a_removal_leaves_a_step_that_was_leased_since(
    root: Path, gate: Path, cut_off: Node
) -> None:
    commit_steps(root, 1, 2)
    planned = plan_prune(root, keep_last(1), time.time())
    cut_off.begin(prune_behind, gate, root, planned)
    with gate.open("w"):
        cut_off.network("down")
        lease = acquire_lease(root, 1, "explorer")
        cut_off.network("up")
    with lease, pytest.raises(CommitError, match="lost the lock"):
        cut_off.end()
    assert require_committed(root, 1)


def test_a_server_that_starts_again_in_the_middle_of_a_save_loses_nothing(
    root: Path, spool_folder: Path
) -> None:
    with acquire_commit_lock(root):
        pass  # the client has a state there, which it has to claim again
    serve(0)
    try:
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(write_shard, root, spool_folder, 1, 1.0)
            assert not wait([saved], 3).done
            serve(8)
            commit(save_of(root, 1), saved.result())
    finally:
        serve(8)
    assert_holds(root, 1, 1.0)
