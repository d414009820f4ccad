"""Which signals a coordinator takes for itself, and for how long; a time limit ends as they do."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import environment
from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.waiting import until
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from tests.unit.snapshot.test_overlap import BIG
from trinity_sync import CheckpointCoordinator, ConfigError, RolloutLedger, Settings
from trinity_sync.client.coordinator import CLOSE_S
from trinity_sync.client.preemption import Preemption
from trinity_sync.client.saver_control import SaverControl
from trinity_sync.errors import SaveFailedError, SaveTimeoutError
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.ticket import ticket_path
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import Run, join_run, list_runs


@pytest.fixture
def others() -> Iterator[list[int]]:
    """What another program's handler of SIGUSR1 has seen."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: seen.append(signum))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_an_emergency_save_raises_nothing_where_the_root_cannot_be_used(
    saves: Saves, job: Job
) -> None:
    (job.root / ".trinity_sync").rename(job.root / "moved")
    (job.root / ".trinity_sync").write_text("in the way")
    words = saves.emergency_save(4, {"model": {"w": torch.ones(3)}}, deadline_s=5)
    assert (words.submitted, words.committed) == ((), ())
    assert "model: not submitted" in words.undone[0]


def test_an_emergency_save_raises_nothing_whatever_the_states_are(saves: Saves, job: Job) -> None:
    states = {"model": {"w": torch.ones(3)}, "extra_state": {"loader": (i for i in range(3))}}
    words = saves.emergency_save(4, states, deadline_s=0)
    assert words.undone[0].startswith("model: not submitted")
    words = saves.emergency_save(5, {"extra_state": states["extra_state"]}, deadline_s=5)
    assert words.submitted == ()
    assert "extra_state: not submitted" in words.undone[0]
    assert "loader cannot be pickled, TypeError" in words.undone[0]
    words = saves.emergency_save(6, states, deadline_s=5)
    assert words.submitted == ("model",)
    assert any("loader cannot be pickled" in sentence for sentence in words.undone)
    job.commit(6, "model", kind="state_dict")
    words = saves.emergency_save("seven", states, deadline_s=1)  # type: ignore[arg-type]
    assert "step 'seven' is not a whole number" in words.undone[0]


def test_an_emergency_save_tells_of_an_earlier_save_that_failed(saves: Saves) -> None:
    odd = {"w": torch.ones(BIG), "f": lambda: 0}
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.save(4, {"model": odd}, overlap=True)
    words = saves.emergency_save(5, {"model": {"w": torch.ones(3)}}, deadline_s=0.5)
    assert words.submitted == ("model",)
    assert any(sentence.startswith("step 4, role actor") for sentence in words.undone)


def test_an_emergency_save_is_made_where_the_first_save_was_torn(saves: Saves) -> None:
    weight = torch.ones(BIG)
    torn = [torch.ones(16 << 20), weight]
    saves.save(4, {"model": torn}, overlap=True)
    weight.add_(1)  # long before the other is copied
    words = saves.emergency_save(5, {"model": torn}, deadline_s=5)
    assert words.submitted == ("model",)


def test_an_emergency_save_of_a_step_whose_save_failed_saves_it(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    states = {"model": {"w": torch.ones(3)}, "optim": {"m": torch.zeros(3)}}
    in_the_way = step_folder(job.root, 4)
    in_the_way.write_text("so that nothing can be written")
    saves.save(4, states)
    with pytest.raises(SaveFailedError):
        saves.wait_all(250)
    words = saves.emergency_save(4, states, deadline_s=0)
    assert words.committed == ()
    assert any("not submitted" in sentence for sentence in words.undone)
    in_the_way.unlink()
    words = saves.emergency_save(4, states, deadline_s=30)
    assert (words.undone, sorted(words.committed)) == ((), ["checkpoint", "state_dict"])
    assert load_states(job.root, 4, "actor").keys() == states.keys()


def test_what_interrupts_an_emergency_save_ends_it(coordinator_of: Open) -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinator_of().emergency_save(4, {"model": Interrupts()}, deadline_s=5)


WAITS = """
import sys, torch
from trinity_sync import CheckpointCoordinator
with CheckpointCoordinator(sys.argv[1]) as saves:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.ones(3)}})
    print("saved", flush=True)
"""


def leave(saves: CheckpointCoordinator, code: int | None) -> None:
    with saves:
        saves.save(1, {"model": {"w": torch.ones(3)}})
        saves.save(2, {"model": {"w": threading.Lock()}})
        sys.exit(code)


@pytest.mark.parametrize("code", [None, 0])
def test_a_block_that_is_left_by_an_exit_without_an_error_raises_what_has_failed(
    coordinator_of: Open, job: Job, code: int | None
) -> None:
    with pytest.raises(SaveFailedError, match="step 2"):
        leave(coordinator_of(trigger=CommitsHere()), code)
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_a_block_that_is_left_by_an_exit_with_an_error_waits_for_nothing(saves: Saves) -> None:
    with pytest.raises(SystemExit, match="3"):
        leave(saves, 3)  # what nothing commits


def test_an_interrupted_end_says_what_is_in_memory_and_does_not_wait_for_a_server(
    job: Job, tmp_path: Path
) -> None:
    spool = str(job.spool.folder.parent)
    with environment({"TRINITY_SYNC_SPOOL": spool, "TRINITY_SYNC_HOME": str(tmp_path / "home")}):
        training = Program(WAITS, job.root, talks=True)
    try:
        assert training.stdout.readline() == "saved\n"
        os.kill(training.pid, signal.SIGINT)
        training.end(1, timeout=CLOSE_S - 1)
        said = training.stderr.read()
    finally:
        training.clear()
    assert "save actor step 1, save actor step 2" in said
    assert f"trinity-sync runs {job.root}" in said
    assert {sealed.ticket.step for sealed in job.spool.tickets()[0]} == {1, 2}


def test_a_signal_that_another_thread_receives_ends_a_wait_as_well(
    coordinator_of: Open, raising: Callable[..., None]
) -> None:
    """So does one that comes between the last look for signals and the wait."""
    saves = coordinator_of(trigger=CommitsWhenTold())
    saves.save(4, {"model": {"w": torch.ones(3)}})
    ended, in_time = threading.Event(), list[bool]()

    def send() -> None:
        until(lambda: saves._watcher._waiting, "the wait")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        in_time.append(ended.wait(9))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Interrupted):
        saves.wait_all(14)
    ended.set()
    sender.join()
    assert in_time == [True]


def test_the_coordinator_that_takes_the_signal_later_keeps_it_and_gives_it_back(
    coordinator_of: Open, others: list[int]
) -> None:
    first, second = coordinator_of(), coordinator_of()
    first.on_preemption(signal.SIGUSR1)
    second.on_preemption(signal.SIGUSR1)
    second.on_preemption(signal.SIGUSR1, grace_s=5)
    first.close(timeout=0)
    signal.raise_signal(signal.SIGUSR1)
    assert second.preempted
    assert others == []
    second.close(timeout=0)
    signal.raise_signal(signal.SIGUSR1)
    assert others == [signal.SIGUSR1]


class Interrupted(Exception):
    """What a handler raises."""


@pytest.fixture
def raising() -> Iterator[Callable[..., None]]:
    """A handler of SIGUSR1 that raises `Interrupted`."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield interrupt
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def signal_at(call: int) -> Iterator[Callable[[], bool]]:
    """Send SIGUSR1 as a function is called for the ``call``-th time; yield whether it was sent."""
    left = call

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        left -= event == "call"
        if not left:
            left = -1
            signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(count)
    try:
        yield lambda: left < 0
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("overlap", [False, True])
def test_wherever_a_handler_raises_a_save_is_submitted_completely_or_not_at_all(
    saves: Saves, job: Job, raising: Callable[..., None], overlap: bool
) -> None:
    saves.prewarm({"model": 5000, "optim": 5000})
    step, call, sent, submitted = 0, 0, True, 0
    while sent:
        step, call = step + 1, call + 1
        states = {name: {"w": torch.full((1000,), float(step))} for name in ("model", "optim")}
        try:
            with signal_at(call) as was_sent:
                saves.save(step, states, overlap=overlap)
                saves.wait_staged()
        except Interrupted:
            pass
        sent = was_sent()
        assert signal.getsignal(signal.SIGUSR1) is raising
        saves.wait_staged()
        sealed = job.spool.read_step(job.save(step))
        assert sorted(each.ticket.component for each in sealed) in ([], ["model", "optim"])
        followed = [save.request.step for save in saves._watcher._pending.values()]
        assert followed.count(step) == bool(sealed)
        for each in sealed:  # as after a commit
            ticket_path(each.slot).unlink()
        submitted += bool(sealed)
    assert 0 < submitted < step
    assert len([*job.spool.folder.glob("*.slot")]) == 4  # none was lost
    saves.save(step + 1, states)
    committer = threading.Thread(target=job.commit, args=(step + 1, *states), daemon=True)
    committer.start()
    committer.join(60)
    assert not committer.is_alive()  # no lock of the main thread was left held


def test_wherever_a_handler_raises_in_an_upload_the_caller_gets_its_error(
    saves: Saves, raising: Callable[..., None]
) -> None:
    call, sent, raised = 0, True, True
    while sent:
        assert raised
        call, raised = call + 1, False
        model = {"w": torch.full((3,), float(call))}
        try:
            with signal_at(call) as was_sent:
                saves.upload(call, lambda state=model: state)
        except Interrupted:
            raised = True
        sent = was_sent()
    saves.close(timeout=0)


def test_wherever_a_handler_raises_in_a_wait_saves_are_followed(
    coordinator_of: Open, raising: Callable[..., None]
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    call, sent = 0, True
    while sent:
        call += 1
        with suppress(Interrupted, SaveTimeoutError), signal_at(call) as was_sent:
            saves.wait_all(0)
        sent = was_sent()
    saves.save(4, {"model": {"w": torch.ones(3)}})
    saves.wait_all(250)


def test_a_handler_that_raises_ends_the_wait_for_a_slot(
    saves: Saves, job: Job, raising: Callable[..., None]
) -> None:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.ones(3)}})
    before = signal.signal(signal.SIGALRM, raising)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            saves.save(3, {"optim": {"w": torch.ones(3)}, "model": {"w": torch.ones(3)}})
    finally:
        signal.signal(signal.SIGALRM, before)
    job.commit(1)
    saves.save(3, {"optim": {"w": torch.ones(3)}, "model": {"w": torch.ones(3)}})
    job.commit(3, "model", "optim")


def test_what_faulthandler_writes_at_a_signal_is_written_after_a_save_as_before(
    saves: Saves, job: Job, others: list[int]
) -> None:
    with (job.root.parent / "traces").open("w+") as traces:
        faulthandler.register(signal.SIGUSR1, traces, chain=True)
        try:
            saves.save(4, {"model": {"w": torch.ones(3)}})
            signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        traces.seek(0)
        assert "most recent call first" in traces.read()
    assert others == [signal.SIGUSR1]


def test_a_handler_that_raises_ends_no_emergency_save(
    coordinator_of: Open, job: Job, raising: Callable[..., None]
) -> None:
    class Signals:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return list, ()

    states = {"model": {"w": torch.ones(3)}, "optim": {"odd": Signals()}}
    done = coordinator_of().emergency_save(4, states, deadline_s=0.5)
    assert done.submitted == ("model", "optim")
    sealed = job.spool.read_step(job.save(4))
    assert {each.ticket.component for each in sealed} == {"model", "optim"}


def test_an_emergency_save_names_what_was_submitted_of_the_step_before(
    coordinator_of: Open,
) -> None:
    saves = coordinator_of(trigger=CommitsWhenTold())
    states = {"model": {"w": torch.ones(3)}, "optim": {"m": torch.zeros(3)}}
    saves.save(4, states)
    words = saves.emergency_save(4, states, deadline_s=0.1)
    assert (sorted(words.submitted), words.committed) == (["model", "optim"], ())


def test_an_emergency_save_does_not_wait_for_a_role_that_this_process_saves_next(
    coordinator_of: Open,
) -> None:
    saves = coordinator_of(trigger=CommitsHere(), roles=("actor", "critic"))
    states = {"model": {"w": torch.ones(3)}}
    for role in saves.roles:
        saves.save(4, states, role=role)
    saves.wait_all(250)
    first = saves.emergency_save(5, states, deadline_s=300)
    assert "once this process has saved critic as well" in first.undone[0]
    last = saves.emergency_save(5, states, role="critic", deadline_s=60)
    assert (last.undone, sorted(last.committed)) == ((), ["checkpoint", "state_dict"])


@pytest.mark.parametrize(
    ("call", "within"),
    [
        (CheckpointCoordinator.begin, join_run),
        (lambda saves: saves.record_metrics(4, {"reward": 0.5}), Future.__init__),
        (lambda saves: saves.prewarm({"model": 5000}), threading.Condition.notify_all),
        (lambda saves: saves.close(timeout=0), threading.Condition.notify_all),
    ],
    ids=["begin", "record_metrics", "prewarm", "close"],
)
def test_a_handler_may_save_while_a_lock_is_held(
    saves: Saves,
    job: Job,
    raising: Callable[..., None],
    call: Callable[..., object],
    within: FunctionType,
) -> None:
    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is within.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGALRM, raising)  # ends a wait for ever
    signal.signal(signal.SIGUSR1, lambda *_: saves.save(4, {"model": {"w": torch.ones(3)}}))
    signal.setitimer(signal.ITIMER_REAL, 30)
    sys.setprofile(interrupt)
    try:
        call(saves)
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    job.commit(4)


@pytest.mark.parametrize("name", ["issue", "load_state_dict"])
def test_a_handler_saves_a_ledger_before_or_after_what_it_interrupts(name: str) -> None:
    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is RolloutLedger._record.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    ledger, saved = RolloutLedger(), list[dict[str, torch.Tensor]]()
    ledger.issue([1, 2])
    ledger.finish([1])
    given = ([3],) if name == "issue" else (ledger.state_dict(), 0)
    before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(ledger.state_dict()))
    sys.setprofile(interrupt)
    try:
        getattr(ledger, name)(*given)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    resumed = RolloutLedger()
    resumed.load_state_dict(saved[0], step=0)
    assert (resumed.to_issue(), resumed.to_train()) == ([2], [1])


def test_what_a_handler_saves_while_a_run_begins_at_a_step_supersedes_none_up_to_it(
    saves: Saves, job: Job, coordinator_of: Open
) -> None:
    for step in (2, 3):
        saves.save(step, {"model": {"w": torch.ones(3)}})
        job.commit(step)
    saves.close(timeout=0)
    resumed = coordinator_of(run_key="resumed")

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is join_run.__code__:
            sys.setprofile(None)
            resumed.save(4, {"model": {"w": torch.ones(3)}})
            seen.extend(list_runs(job.root))

    seen: list[Run] = []
    sys.setprofile(interrupt)
    try:
        resumed.load(3)
    finally:
        sys.setprofile(None)
    assert {run.number: run.resumed_from for run in seen} == {1: 0, 2: 3}


def test_a_handler_may_save_while_the_saver_is_woken(tmp_path: Path) -> None:
    control = SaverControl(tmp_path, tmp_path)

    def wake() -> None:
        with control._lock:  # as in wake, where the signal comes
            assert not control.is_reached

    waking = threading.Thread(target=wake, daemon=True)
    waking.start()
    waking.join(30)
    assert not waking.is_alive()


HOUR_S = 3600.0
SLURM = "SLURM_JOB_END_TIME"


def age() -> timedelta:
    return timedelta(seconds=time.time() - psutil.Process().create_time())


@pytest.mark.parametrize("limit", ["of the settings", "of the job"])
def test_a_training_ends_before_a_step_that_would_leave_no_time_for_a_save(
    monkeypatch: pytest.MonkeyPatch, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    now, save_by = [100.0], timedelta(0)
    if limit == "of the job":
        monkeypatch.setenv(SLURM, f"{int(time.time() + HOUR_S)}")
    else:
        save_by = age() + timedelta(seconds=HOUR_S)
    ends = Preemption(save_by, clock=lambda: now[0])  # and 30 s for the save
    assert not ends.check()
    for step_s in (1700, 100, 90):  # the longest does not fit again
        now[0] += step_s
        assert ends.check() == (step_s == 90)
    assert ends.left_s == 30
    assert "too soon for another step (at most 1700 s so far) and 30 s for" in caplog.text
    now[0] = 100 + HOUR_S - 5
    assert ends.left_s == pytest.approx(5, abs=2)


def test_a_limit_that_was_extended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM, f"{int(time.time() - 5)}")
    ends = Preemption()
    assert not ends.check()
    assert ends.left_s == 30


@pytest.mark.parametrize("value", ["03:55", "4", "25:61:00"])
def test_a_limit_in_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", value)
    with pytest.raises(ConfigError, match=r"SAVE_BY=.* a unit \(s, m, h or d\), or as 03:55:00"):
        Settings()


@pytest.mark.parametrize(
    ("value", "hours"), [("03:30:00", 3.5), ("1-00:00:00", 24), ("90m", 1.5), ("0s", 0)]
)
def test_a_limit_is_written_as_for_slurm_or_with_a_unit(
    monkeypatch: pytest.MonkeyPatch, value: str, hours: float
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", value)
    settings = Settings()
    assert settings.save_by == timedelta(hours=hours)
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", settings.to_variables()["TRINITY_SYNC_SAVE_BY"])
    assert Settings() == settings


def test_saves_are_awaited_at_the_end_of_a_training_that_made_no_emergency_save(
    coordinator_of: Open, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setenv(SLURM, f"{int(time.time() + 20)}")
    with coordinator_of(trigger=CommitsHere()) as saves:
        saves.save(1, {"model": {"w": torch.ones(3)}})
        assert saves.any_preempted()
    assert read_latest_pointer(job.root, "checkpoint") == 1


RANK = """
import json, sys
import torch.distributed as dist
from trinity_sync import CheckpointCoordinator, Settings
rank, rendezvous, spool, root = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=2)
saves = CheckpointCoordinator.of_process_group(root, settings=Settings(spool=spool, home=spool))
print(json.dumps([saves.preempted, saves.any_preempted()]))
saves.close(timeout=0)
dist.destroy_process_group()
"""


def test_all_ranks_end_at_the_limit_of_one(job: Job, tmp_path: Path, spool_folder: Path) -> None:
    given = [tmp_path / "rendezvous", spool_folder, job.root]
    ranks = [
        Program(RANK, rank, *given, env={**os.environ, **limit})
        for rank, limit in enumerate([{}, {"TRINITY_SYNC_SAVE_BY": "10s"}])
    ]
    said = [json.loads(rank.end()) for rank in ranks]
    assert said == [[False, True], [True, True]]
