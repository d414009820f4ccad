"""Processes beside the trainer save their state of the trainer's steps, and resume with it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk import flip_a_byte, no_file_opens
from tests.support.forked import Program
from tests.support.savers import await_that
from tests.unit.saver.conftest import Make
from trinity_sync import Checkpoints, Participant, RolloutLedger, Settings
from trinity_sync.client import cut
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    LockTimeoutError,
    SaveError,
    SaveFailedError,
    SaveTimeoutError,
)
from trinity_sync.fs.records import encode_record
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

ROLES = ("actor", "queue", "controller")
MODEL = {"model": {"w": torch.ones(3)}}

QUEUE = """
import sys
from pathlib import Path
from trinity_sync import Participant, RolloutLedger, Settings

root, spool, home, key, work = sys.argv[1:]
work = Path(work)
with Participant(
    root, role="queue", roles=("actor", "queue", "controller"), run_key=key,
    settings=Settings(spool=spool, home=home, saver="auto"),
) as part:
    step = part.latest_step()
    if step is None:
        work.mkdir()
        (work / "items").write_bytes(b"")
        state = {"at": 0}
    else:
        state = part.load(step)
        part.restore_folder(step, "storage", work)
    print(step, state["at"], (work / "items").read_bytes().decode(), flush=True)
    for line in sys.stdin:
        if line == "put\\n":
            state["at"] += 1
            with (work / "items").open("ab") as file:
                file.write(b"i")
        elif line == "cut\\n":
            step = part.wait_cut(60)
            part.save(step, state, folders={"storage": work})
            (work / "items").write_bytes(b"overwritten")  # the source changes afterwards
            (work / "items").write_bytes(b"i" * state["at"])
        print("done", flush=True)
"""


@pytest.fixture
def queue(job: object, settings: Settings, tmp_path: Path) -> Iterator[Callable[..., "Queue"]]:
    started: list[Queue] = []

    def start(root: Path, key: str, work: str) -> Queue:
        started.append(Queue(root, settings, key, tmp_path / work))
        return started[-1]

    yield start
    for each in started:
        each.process.clear()


class Queue:
    """A queue in a process of its own."""

    def __init__(self, root: Path, settings: Settings, key: str, work: Path) -> None:
        given = (root, settings.spool, settings.home, key, work)
        self.process = Program(QUEUE, *given, talks=True)
        self.began = self.read()

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        print(word, file=self.process.stdin, flush=True)


def join(trainer: CheckpointCoordinator, role: str = "controller", key: str = "run") -> Participant:
    """A participant of a trainer's job."""
    how: dict[str, Any] = {"roles": trainer.roles, "settings": trainer.settings}
    return Participant(trainer.root, role=role, run_key=key, **how)


@contextmanager
def answering(part: Participant, answer: Callable[[int | None], object]) -> Iterator[None]:
    """Have a participant answer the cut of the block."""
    thread = threading.Thread(target=lambda: answer(part.wait_cut(60)))
    thread.start()
    yield
    thread.join()


def test_all_roles_resume_from_the_moment_of_the_cut_after_all_were_killed(
    coordinator: Make, tmp_path: Path, queue: Callable[..., Queue]
) -> None:
    trainer = coordinator(roles=ROLES, run_key="first")
    other = join(trainer, key="first")
    held = queue(trainer.root, "first", "work")
    assert held.began == "None 0"
    for word in ("put", "put", "cut"):
        held.say(word)
    answering = threading.Thread(target=lambda: other.save(other.wait_cut(60), {"cursor": 17}))
    answering.start()
    assert 0 < trainer.cut(4) < 60
    trainer.save(4, MODEL)
    held.process.kill()
    answering.join()
    other.close()
    trainer.wait_all(250)
    trainer.close()

    assert queue(trainer.root, "second", "restored").began == "4 2 ii"
    with join(trainer, key="second") as resumed:
        assert resumed.load(4) == {"cursor": 17}
    with pytest.raises(ConfigError, match="has files"):
        resumed.restore_folder(4, "storage", tmp_path / "restored")
    with pytest.raises(CommitError, match="no folder controller/storage"):
        resumed.restore_folder(4, "storage", tmp_path / "new")


def test_a_changed_byte_of_a_participants_folder_is_found(
    coordinator: Make, tmp_path: Path
) -> None:
    (tmp_path / "storage" / "below").mkdir(parents=True)
    (tmp_path / "storage" / "below" / "items").write_bytes(b"item" * 5000)
    (tmp_path / "storage" / "none").touch()
    trainer = coordinator(roles=("actor", "queue"), run_key="run")
    part = join(trainer, "queue")
    part.prewarm(20_000)
    part._saves._stager.memory.run(looks=False)
    slots = {path.name for path in part._saves.spool.folder.glob("queue*.slot")}
    with part:
        part.save(1, {}, folders={"storage": tmp_path / "storage"})
        kept = {path.name for path in part._saves.spool.folder.glob("queue*metadata*.slot")}
        assert kept == {name for name in slots if "metadata" in name} != set()
        trainer.save(1, MODEL)
    part.restore_folder(1, "storage", tmp_path / "copy")
    assert (tmp_path / "copy" / "below" / "items").read_bytes() == b"item" * 5000
    path = trainer.root / "global_step_1" / "queue" / "storage" / "below" / "items"
    flip_a_byte(path, 7777)
    with pytest.raises(CommitError, match="items is corrupted"):
        part.restore_folder(1, "storage", tmp_path / "other")
    (step,) = judge_steps(check_files(choose_files(trainer.root, step=1)))
    assert "queue/storage/below/items" in step.wrong


def test_a_step_with_all_parts_comes_back_from_a_store_on_an_empty_machine(
    coordinator: Make, settings: Settings, tmp_path: Path, bucket: str
) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "items").write_bytes(b"item" * 5000)
    trainer = coordinator(roles=("actor", "queue"), run_key="run")
    ledger = RolloutLedger()
    ledger.issue(range(4))
    ledger.train([0], 1)
    with join(trainer, "queue") as part:
        state = {"ledger": ledger.state_dict()}
        part.save(1, state, folders={"storage": tmp_path / "storage"})
        trainer.attach_folder("loader", tmp_path / "storage", step=1)
        trainer.save(1, MODEL)
    replicate(trainer.root, f"s3://{bucket}/job", 1)
    fetch(f"s3://{bucket}/job", 1, tmp_path / "elsewhere")
    other = Settings(spool=settings.spool, home=tmp_path / "other", saver="auto")
    with Participant(
        tmp_path / "elsewhere", role="queue", roles=trainer.roles, run_key="next", settings=other
    ) as there:
        again = RolloutLedger()
        again.load_state_dict(there.load(1)["ledger"], step=1)
        assert again.resume(held=[2]) == [1, 3]
        there.restore_folder(1, "storage", tmp_path / "copy")
    assert (tmp_path / "copy" / "items").read_bytes() == b"item" * 5000
    root = tmp_path / "elsewhere"
    for name in (
        "queue/storage/items",
        "queue/extra_state_world_size_1_rank_0.pt",
        "attachments/loader/items",
        "actor/model_world_size_1_rank_0.pt",
    ):
        flip_a_byte(root / "global_step_1" / name, -9)
        (step,) = judge_steps(check_files(choose_files(root, step=1)))
        assert (step.state, name in step.wrong) == ("corrupted", True)
        flip_a_byte(root / "global_step_1" / name, -9)
        judge_steps(check_files(choose_files(root, step=1)))


def test_the_death_of_a_participant_is_seen_at_the_next_cut(
    coordinator: Make, queue: Callable[..., Queue]
) -> None:
    trainer = coordinator(roles=("actor", "queue"), run_key="run")
    held = queue(trainer.root, "run", "work")
    held.process.kill()
    held.process.wait()
    with pytest.raises(SaveError, match="the process of role queue has died"):
        trainer.cut(1)


def test_a_cut_without_an_answer_names_the_role_and_so_does_the_save(coordinator: Make) -> None:
    trainer = coordinator(roles=ROLES, run_key="run", job={"rank_timeout_s": 0.5})
    with join(trainer):
        with pytest.raises(
            SaveTimeoutError, match="of role queue, which has not started, controller"
        ):
            trainer.cut(1, timeout_s=0.1)
        trainer.save(1, MODEL)
        with pytest.raises(SaveFailedError, match="role queue has submitted nothing"):
            trainer.wait_all(250)


def test_a_state_that_cannot_be_saved_fails_the_cut(coordinator: Make) -> None:
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    part = join(trainer)
    raised: list[BaseException] = []

    def answer(step: int | None) -> None:
        try:
            part.save(step, **given.pop())
        except Exception as error:
            raised.append(error)

    wrong: dict[str, Any] = {"state": {}, "folders": {"storage": None}}
    given = [wrong, {"state": {"queue": lambda: None}}]
    for _ in range(2):
        refused = pytest.raises(SaveError, match="role controller could not be saved")
        with answering(part, answer), refused:
            trainer.cut(1, timeout_s=250)
    assert "cannot be staged" in str(raised[0])
    assert isinstance(raised[1], TypeError)
    with answering(part, lambda step: part.save(step, {"cursor": 1})):
        trainer.cut(1)
    trainer.save(1, MODEL).wait(250)
    part.close()


def test_a_state_that_cannot_be_saved_stops_no_role_that_has_saved(
    coordinator: Make, tmp_path: Path
) -> None:
    (folder := tmp_path / "storage").mkdir()
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    with join(trainer) as part:
        for step, name in enumerate(("items", "link", "items"), 1):
            (folder / name).touch() if name == "items" else (folder / name).symlink_to("nowhere")
            with answering(part, partial(part.save, state={}, folders={"storage": folder})):
                trainer.cut(step, timeout_s=250)
                failure = trainer.save(step, MODEL).failure
            for each in (trainer, part):
                wrong = pytest.raises(SaveFailedError, match=r"storage/link cannot")
                with nullcontext() if name == "items" else wrong:
                    each.wait_all(250)
            assert ("role controller could not be saved" in failure) == (name != "items")
            (folder / name).unlink()
    assert Checkpoints(trainer.root).steps() == [1, 3]


def test_a_state_that_comes_after_the_trainer_has_ceased_to_wait_is_not_that_of_the_step(
    coordinator: Make,
) -> None:
    roles = ("actor", "controller")
    trainer = coordinator(job={"rank_timeout_s": 0.5}, roles=roles, run_key="run")
    with ThreadPoolExecutor(1) as thread:
        part = join(trainer)
        for step, timeout_s in ((1, 60.0), (2, 0.5), (3, 60.0)):
            asked = thread.submit(trainer.cut, step, timeout_s=timeout_s)
            assert part.wait_cut(60) == step
            if step == 2:
                assert asked.exception(60) is None  # the save of the step tells it
            late = part.save(step, {"at": step}).failure  # the trainer is at step 7
            assert ("whose state is that of a later moment" in late) == (step == 2)
            asked.exception(60)
            trainer.save(step, MODEL)
            if step == 2:
                with pytest.raises(
                    SaveFailedError, match=r"no state within 0\.5 s of role controller"
                ):
                    trainer.wait_all(250)
    trainer.wait_all(250)
    assert [each for each in (1, 2, 3) if read_manifest(trainer.root, each)] == [1, 3]
    with pytest.raises(SaveFailedError, match="step 2, role controller: not saved"):
        part.wait_all(250)
    part.close()


def test_a_step_without_a_cut_fails_each_save_and_an_emergency_save_and_not_a_later_cut(
    coordinator: Make,
) -> None:
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    with join(trainer) as part:

        def save(step: int) -> None:
            with answering(part, lambda at: part.save(at, {"at": step})):
                trainer.cut(step, timeout_s=250)
            trainer.save(step, MODEL).wait(250)

        save(1)
        trainer.cut(2, timeout_s=0.1)
        for _ in range(2):
            trainer.save(2, MODEL)
            with pytest.raises(SaveFailedError, match=r"no state within 0\.1 s of role controller"):
                trainer.wait_all(250)
        undone = trainer.emergency_save(2, {"extra_state": MODEL["model"]}, deadline_s=60).undone
        assert "no state within 0.1 s of role controller" in undone[0]
        save(2)
    assert Checkpoints(trainer.root).steps() == [1, 2]


def test_a_participant_that_can_open_no_file_goes_on_and_saves_the_next_step(
    coordinator: Make,
) -> None:
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    with join(trainer) as part:
        for step, opens in enumerate((nullcontext, no_file_opens, nullcontext), 1):
            cutting = threading.Thread(target=trainer.cut, args=(step,), kwargs={"timeout_s": 1.0})
            cutting.start()
            await_that(lambda step=step: part.wait_cut(60) == step, "the step is asked for")
            with opens():
                assert part.wait_cut() in (step, None)
                assert bool(part.save(step, {"at": step}).failure) == (opens is no_file_opens)
            cutting.join()
            trainer.save(step, MODEL)
            for each in (trainer, part):
                with pytest.raises(SaveFailedError) if step == 2 else nullcontext():
                    each.wait_all(250)
    assert Checkpoints(trainer.root).steps() == [1, 3]


def test_a_request_of_an_earlier_start_is_not_answered(
    coordinator: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer of another start is none of this one."""
    monkeypatch.setattr(cut, "TAKEN_S", 0.1)
    trainer = coordinator(roles=ROLES, run_key="first")
    with pytest.raises(SaveTimeoutError):
        trainer.cut(1, timeout_s=0)
    left = cut.CutRequest("of a trainer that was killed", "first", 1)
    (trainer.root / ".trinity_sync/cuts/request.json").write_text(encode_record(left))
    with join(trainer, key="second") as part:
        assert part.wait_cut() is None
        with pytest.raises(LockTimeoutError, match=r"controller\.lock"):
            join(trainer, key="second")
        missing = "role queue, which has not started, controller, which has not started"
        with pytest.raises(SaveTimeoutError, match=missing):
            trainer.cut(2, timeout_s=0)
    trainer.close()


def test_a_participant_needs_the_runs_key_and_a_role_of_the_job(
    coordinator: Make, settings: Settings
) -> None:
    root = coordinator(roles=ROLES).root
    with pytest.raises(ConfigError, match="TRINITY_SYNC_RUN_KEY"):
        Participant(root, role="queue", roles=ROLES, settings=settings)
    with pytest.raises(ConfigError, match="none of this job's roles"):
        Participant(root, role="buffer", roles=ROLES, run_key="a", settings=settings)


def test_a_role_or_folder_whose_name_no_file_can_have_is_refused_where_it_is_given(
    coordinator: Make, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"role 'q{101}' may hold .*, 100 at most"):
        coordinator(roles=("actor", "q" * 101))
    roles = ("actor", "q" * 100)
    trainer = coordinator(roles=roles, run_key="run")
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / ("f" * 200)).write_bytes(b"x")
    (tmp_path / "too long").mkdir()
    (tmp_path / "too long" / ("f" * 201)).write_bytes(b"x")
    with join(trainer, roles[1]) as part:
        for folders in ({"../x": tmp_path / "storage"}, {"x": tmp_path / "too long"}):
            with pytest.raises(ConfigError, match="pass a path below the folder"):
                part.save(1, {}, folders=folders)
        trainer.save(1, MODEL)
        part.save(1, {}, folders={"storage": tmp_path / "storage"}).wait(250)


def test_a_participant_that_died_alone_cannot_go_on_with_an_older_state(coordinator: Make) -> None:
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    with join(trainer) as part:
        part.save(1, {"cursor": 1})
        trainer.save(1, MODEL)
    with join(trainer) as again, pytest.raises(ConfigError, match="cannot begin again"):
        again.load(1)


def test_a_cut_that_is_repeated_is_not_answered_with_the_state_of_the_first(
    coordinator: Make,
) -> None:
    trainer = coordinator(roles=("actor", "controller"), run_key="run")
    with join(trainer) as part:
        with pytest.raises(SaveTimeoutError):
            trainer.cut(1, timeout_s=0.1)
        part.save(1, {"cursor": 1})  # late
        for cursor, refused in ((1, False), (2, True)):
            other = pytest.raises(SaveError, match="another state")
            answer = partial(part.save, state={"cursor": cursor})
            with answering(part, answer), other if refused else nullcontext():
                trainer.cut(1, timeout_s=250)
        trainer.save(1, MODEL)  # which commits the first state
        with pytest.raises(SaveFailedError):
            part.wait_all(250)


def test_what_the_trainer_keeps_holds_though_a_participants_image_came_first(
    coordinator: Make,
) -> None:
    trainer = coordinator(roles=("actor", "queue"), run_key="run")
    with join(trainer, "queue") as part:
        for step in (1, 2, 3, 4):
            part.save(step, {"at": step})
            begun = trainer.spool.folder.glob
            await_that(lambda begun=begun: [*begun("*.begun.json")], "the saver has begun the save")
            trainer.save(step, MODEL, keep=2).wait(250)
    await_that(lambda: Checkpoints(trainer.root).steps() == [3, 4], "the older steps are removed")
