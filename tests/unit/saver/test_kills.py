"""A saver that is killed between any two changes of names loses nothing; the next one goes on."""

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.dying import end_of, in_a_process
from tests.support.job import Job
from trinity_sync import saver as saver_module
from trinity_sync.client.saver_control import SERVED, name_saver
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX
from trinity_sync.pipeline.save import SaverDriver
from trinity_sync.saver import Saver
from trinity_sync.saves.journal import read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.storage.discovery import find_newest, iter_committed_steps
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.restore import load_states

KEEP = 2


def live(spool: Path) -> None:
    """Commit what waits, and end."""
    saver = Saver(spool, StackSettings())
    saver._look()
    for look in saver._looks.values():
        look.join()
    for save in list(saver._saves.values()):
        save.join()


def require_newest(job: Job, step: int) -> None:
    assert find_newest(job.root).step == step
    states = load_states(job.root, step, "actor")
    assert states["model"]["w"].tolist() == [float(step)] * 9
    assert states["optim"] == {"step": step}


def test_a_saver_that_is_killed_at_any_instant_of_a_commit_is_replaced_without_loss(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "SETTLE_S", -60.0)  # the next saver comes much later
    remote, notes = tmp_path / "remote", tmp_path / "notes"
    notes.mkdir()
    spool = job.spool.folder.parent
    write_job_settings(job.root, {"remote": remote.as_uri(), "remote_required": True})
    instants = itertools.count(1)
    for step in itertools.count(1):
        states = {"model": {"w": torch.full((9,), float(step))}, "optim": {"step": step}}
        job.stage(step, states, keep=KEEP)
        (job.spool.folder / SERVED).write_text(f"0 {name_saver()}")
        instant = next(instants) if step > KEEP else None  # from then on a step is removed
        reached = in_a_process(lambda: live(spool), notes, die_before=instant)
        if found := find_newest(job.root):
            require_newest(job, found.step)
            assert found.step in (step - 1, step)
        in_a_process(lambda: live(spool), notes)
        require_newest(job, step)
        told = read_entry(job.request(step))
        assert told, f"killed at instant {instant}, step {step} is not told"
        assert told.state == "completed"
        left = {each.step for each in iter_committed_steps(job.root)}
        assert left == {*range(max(1, step + 1 - KEEP), step + 1)}
        assert (remote / f"global_step_{step}/manifest.json").exists()
        assert not [*job.spool.folder.glob("*.ticket")]
        assert not [*job.spool.folder.glob(f"*{saver_module.BEGUN}")]
        assert not [*job.root.glob(f"global_step_*/actor/.*{TEMPORARY_SUFFIX}")]
        if instant and reached != instant:
            break
    assert instant > 20


def test_a_save_that_fails_is_told_at_whatever_instant_its_saver_is_killed(
    job: Job, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    spool = job.spool.folder.parent
    job.world_size = 2  # of which one is lost
    write_job_settings(job.root, {"rank_timeout_s": 0.01})
    for step in itertools.count(1):
        job.stage(step, {"model": {"w": torch.ones(9)}})
        (job.spool.folder / SERVED).write_text(f"0 {name_saver()}")
        reached = in_a_process(lambda: live(spool), notes, die_before=step)
        in_a_process(lambda: live(spool), notes)
        told = read_entry(job.request(step))
        assert told, f"killed at instant {step}, nothing is told"
        assert "rank 1 was not submitted" in told.message, f"killed at instant {step}"
        assert not [*job.spool.folder.glob(f"*{saver_module.BEGUN}")]
        if reached != step:
            break
    assert step > 2


class Killing(SaverDriver):
    """Saves in which the kernel kills the saver for its memory."""

    async def _persist(self) -> None:
        if self.request.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._persist()

    async def _copy(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledSaver(Saver):
    def _make_driver(self, request: SaveRequest) -> SaverDriver:
        return Killing(request, self._stack, self._spool, self._node)


def live_long(spool: Path) -> None:
    """Commit what waits, as long as anything does, and end."""
    saver = KilledSaver(spool, StackSettings())
    while saver._look():
        for save in list(saver._saves.values()):
            save.join()


@pytest.mark.parametrize("step", [1, 2])
def test_a_save_that_kills_its_savers_fails_and_holds_up_no_other(
    job: Job, tmp_path: Path, step: int
) -> None:
    """Before its commit, or after it."""
    spool, root = job.spool.folder.parent, tmp_path / "other"
    other = Job.open(root, spool)
    write_job_settings(job.root, {"remote": (tmp_path / "remote").as_uri()})
    job.stage(step, {"model": {"w": torch.ones(9)}})
    ends = []
    for later in (11, 12, 13):
        other.stage(later, {"model": {"w": torch.ones(9)}})
        for each in (job, other):
            (each.spool.folder / SERVED).write_text(f"0 {name_saver()}")
        ends.append(end_of(lambda: live_long(spool)))
        if later > 11:  # the others came first
            assert find_newest(root).step == later
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert "2 savers were killed while they saved it" in read_entry(job.request(step)).message
    assert [each.step for each in iter_committed_steps(job.root)] == [2] * (step == 2)
    assert [each.step for each in iter_committed_steps(root)] == [11, 12, 13]
    assert not [*spool.glob(f"*/*{saver_module.BEGUN}")]
    other.close()
