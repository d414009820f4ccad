"""What others wrote runs nothing here, and what flows are given leads nowhere else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.conftest import environment
from tests.support.answers import server
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.unit.conftest import Runs
from trinity_sync.catalog import open_catalog
from trinity_sync.errors import (
    CatalogError,
    CommitError,
    ConfigError,
    ManifestError,
    SaveError,
    SpoolError,
    StackError,
    TrinitySyncError,
)
from trinity_sync.formats.hf_export import allows_remote_code
from trinity_sync.fs.atomic import TRUSTED
from trinity_sync.fs.records import add_digest
from trinity_sync.layout import MANIFEST, shard_file, step_folder, steps_on_disk
from trinity_sync.orchestration.job_registry import (
    require_allowed,
    require_allowed_store,
    select_roots,
)
from trinity_sync.orchestration.on_node import call, persist_share, replicate_step
from trinity_sync.pipeline.save import Share
from trinity_sync.remote.remote_root import Remote, refuse_credentials
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.stack import daemon, local_stack, services, state_file
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState
from trinity_sync.storage.commit import commit
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.save_functions import FunctionStatus
from trinity_sync.tensors.deserialize import load_file


@pytest.fixture
def trap(job: Job, tmp_path: Path) -> Path:
    """A step with a file that would run something; the file that shows it."""
    ran = tmp_path / "ran"
    for step in (1, 2):
        job.commit_states(step, {"model": {"w": torch.zeros(3), "more": Runs(ran)}})
    return ran


ALLOWS = """
import sys
import numpy, torch
from trinity_sync.tensors.deserialize import load_file

with torch.serialization.safe_globals([numpy.ndarray]):
    load_file(sys.argv[1])
load_file(sys.argv[1])  # the end of the block has undone what the load in it has allowed
torch.serialization.add_safe_globals([numpy.ndarray])  # which trinity_sync allows as well
load_file(sys.argv[1])
assert numpy.ndarray in torch.serialization.get_safe_globals()
torch.load(sys.argv[1], weights_only=True)  # as another thread does meanwhile
"""


def test_what_a_program_lets_torch_load_stays_allowed_after_a_load(tmp_path: Path) -> None:
    path = tmp_path / "arrays.pt"
    torch.save({"a": np.ones(3), "seed": np.float64(1)}, path)
    of_others(path)
    Program(ALLOWS, path).end()


def shards(job: Job) -> list[Path]:
    return [step_folder(job.root, step) / "actor" / shard_file("model", 1, 0) for step in (1, 2)]


def images(job: Job) -> list[Path]:
    return [*job.spool.folder.glob("*.slot")]


def of_others(path: Path) -> None:
    """As if another user might have written it."""
    path.chmod(0o666)


def of_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("files", "become", "read"),
    [
        (shards, of_others, lambda job: load_states(job.root, 2, "actor")),
        (shards, of_others, lambda job: load_file(shards(job)[1])),
        (shards, of_another_user, lambda job: load_states(job.root, 2, "actor")),
        (images, of_others, lambda job: load_states(job.root, 2, "actor", spool=job.spool)),
    ],
    ids=["load", "file", "another user", "image"],
)
def test_what_others_may_have_written_runs_nothing(
    job: Job, trap: Path, files: Any, become: Any, read: Any
) -> None:
    for path in files(job):
        become(path)
    with pytest.raises(
        CommitError, match=r"is not this user's alone.* set TRINITY_SYNC_TRUSTED_PATHS="
    ):
        read(job)
    assert not trap.exists()


SWAPPER = """
import os, sys
name, theirs, ours, begun = sys.argv[1:]
open(begun, "w").close()
while True:
    for file in (ours, theirs):  # a rename between two names of one file does nothing
        os.link(file, name + ".next")
        os.rename(name + ".next", name)
"""


@pytest.fixture
def swapped(job: Job, trap: Path, tmp_path: Path) -> Iterator[Path]:
    """The shard of step 2, whose name others give to their own file and to one of ours in turn."""
    shard = shards(job)[1]
    theirs, ours, begun = (tmp_path / name for name in ("theirs", "ours", "begun"))
    os.link(shard, theirs)
    of_others(theirs)
    ours.write_bytes(bytes(shard.stat().st_size))
    command = [sys.executable, "-c", SWAPPER, *map(str, (shard, theirs, ours, begun))]
    with subprocess.Popen(command) as swapper:
        try:
            while not begun.exists():
                assert swapper.poll() is None
            yield shard
        finally:
            assert swapper.poll() is None
            swapper.kill()


@pytest.mark.parametrize(
    "read",
    [
        lambda root, _: load_states(root, 2, "actor"),
        lambda _, shard: load_file(shard),
        lambda _, shard: load_file(shard, mmap=True),
    ],
    ids=["load", "file", "mapped"],
)
def test_a_file_that_is_swapped_while_it_is_loaded_runs_nothing(
    job: Job, trap: Path, swapped: Path, read: Any
) -> None:
    refused = 0
    while refused < 50 and not trap.exists():
        try:
            read(job.root, swapped)
        except CommitError as error:
            refused += "is not this user's alone" in str(error)
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError, TrinitySyncError):
            continue  # ours, which holds nothing
    assert not trap.exists()


def test_own_and_trusted_files_are_loaded_whole(
    job: Job, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_states(job.root, 2, "actor")
    assert trap.exists()
    trap.unlink()
    of_others(shards(job)[1])
    monkeypatch.setenv(TRUSTED, f"/elsewhere:{job.root}")
    load_states(job.root, 2, "actor")
    assert trap.exists()


def test_tensors_and_random_states_of_others_are_loaded_and_arrays_of_objects_are_not(
    job: Job, tmp_path: Path
) -> None:
    rng = {"numpy": np.random.RandomState(1).get_state(), "cpu": torch.get_rng_state()}
    job.commit_states(1, {"model": {"w": torch.randn(3)}, "extra_state": {"rng": rng}})
    own = load_states(job.root, 1, "actor")
    for path in (step_folder(job.root, 1) / "actor").glob("*.pt"):
        of_others(path)
    theirs = load_states(job.root, 1, "actor")
    assert torch.equal(own["model"]["w"], theirs["model"]["w"])
    assert np.array_equal(rng["numpy"][1], theirs["extra_state"]["rng"]["numpy"][1])
    path = tmp_path / "file.pt"
    torch.save({"a": np.array([Runs(tmp_path / "ran")], dtype=object)}, path)
    of_others(path)
    with pytest.raises(CommitError, match="holds more than tensors"):
        load_file(path)
    assert not (tmp_path / "ran").exists()


def edited(root: Path, change: Any) -> None:
    """A forged manifest with the right digest of its own text."""
    path = step_folder(root, 1) / MANIFEST
    body = json.loads(path.read_text())
    del body["digest"]
    change(body)
    path.write_text(add_digest(json.dumps(body)))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["files"][0].update(path="../../outside"),
        lambda body: body["files"][0].update(path="/etc/passwd"),
        lambda body: body["files"][0].update(role="../critic"),
        lambda body: body["files"][0].update(path=7),
        lambda body: body.update(files=None),
        lambda body: body["callables"].append(
            {"name": "f", "rank": 0, "seconds": 1, "files": ["../outside"]}
        ),
    ],
)
def test_a_manifest_that_leads_elsewhere_or_is_none_is_refused(tmp_path: Path, change: Any) -> None:
    commit_files(tmp_path, 1)
    edited(tmp_path, change)
    with pytest.raises(ManifestError):
        read_manifest(tmp_path, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": ["../.."]},
        {"components": ["../model"]},
        {"step": -1},
        {"root": "ckpts"},
        {"identity": "../.."},
    ],
)
def test_a_request_that_names_no_role_component_or_path_is_refused(
    job: Job, wrong: dict[str, Any]
) -> None:
    with pytest.raises((ValidationError, ConfigError)):
        job.request(**{"step": 1, **wrong})


def test_images_are_taken_from_the_jobs_own_spool_alone(job: Job, tmp_path: Path) -> None:
    assert get_job_spool(job.spool.folder, job.save(1)) == job.spool
    with pytest.raises(SpoolError, match="not of"):
        get_job_spool(job.spool.folder, replace(job.save(1), root=str(tmp_path / "other")))
    job.spool.folder.chmod(0o777)
    with pytest.raises(SpoolError, match="open to other users"):
        get_job_spool(job.spool.folder, job.save(1))
    job.spool.folder.chmod(0o700)
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    (sealed,) = job.spool.tickets()[0]
    other = tmp_path / "other"
    other.mkdir()
    request = SaveRequest(root=str(other), step=1, run=1, components=("model",))
    shards = NodeShards("here", str(job.spool.folder), {"actor": (0,)})
    with pytest.raises(SpoolError, match="not of"):
        persist_share(request, Share("model"), shards)
    assert list(other.iterdir()) == []
    assert [image.ticket for image in job.spool.tickets()[0]] == [sealed.ticket]


def test_flows_work_where_they_are_allowed_to(tmp_path: Path) -> None:
    allowed = StackSettings(worker={"allowed_paths": [tmp_path / "jobs"]})
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "jobs" / "link").symlink_to(tmp_path / "out")
    one = tmp_path / "jobs" / "one"
    assert select_roots(str(one), Settings(), allowed) == [one]
    require_allowed(tmp_path / "out", StackSettings())
    for path in (tmp_path / "out", tmp_path / "jobs/../out", tmp_path / "jobs/link"):
        with pytest.raises(ConfigError, match=r"worker\.allowed_paths names"):
            require_allowed(path, allowed)
    with environment({"TRINITY_SYNC_STACK__WORKER__ALLOWED_PATHS": str(tmp_path / "jobs")}):
        assert call(str(one), steps_on_disk, str(one)).unwrap() == []
        with pytest.raises(ConfigError, match=r"worker\.allowed_paths names"):
            call(str(tmp_path / "out"), steps_on_disk, str(one)).unwrap()


SPELLED = [
    *("file://{}", "local://{}", "file://{}/../theirs", "file:/{}", "file:{}", "FILE://{}"),
    *("async_wrapper::file://{}", "async_wrapper://::file://{}", "simplecache::file://{}"),
    *("filecache::local://{}", "dir::file://{}", "dir://{}::file:///"),
    *("zip://x::file://{}/a.zip", "s3://bucket/job::file://{}", "reference://{}"),
    *("asynclocal://{}", "generic://file://{}", "sftp://localhost{}", "webhdfs://localhost{}"),
    *("hdfs://default{}", "memory://{}", "{}"),
]


@pytest.mark.parametrize("spelled", SPELLED)
def test_a_folder_that_is_not_allowed_is_no_store_however_it_is_spelled(
    job: Job, tmp_path: Path, spelled: str
) -> None:
    job.commit_states(1, {"model": {"w": torch.zeros(3)}})
    commit_files(tmp_path / "theirs", 1)
    before = (step_folder(tmp_path / "theirs", 1) / MANIFEST).read_bytes()
    url = spelled.format(tmp_path / "theirs")
    allowed = {"TRINITY_SYNC_STACK__WORKER__ALLOWED_PATHS": str(job.root)}
    with environment(allowed), pytest.raises(ConfigError):
        replicate_step(str(job.root), 1, url)
    assert (step_folder(tmp_path / "theirs", 1) / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("inside", ["file://{}/copies", "local://{}/copies", "file://~/copies"])
def test_a_store_in_an_allowed_folder_or_elsewhere_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    allowed = StackSettings(worker={"allowed_paths": [tmp_path]})
    require_allowed_store(inside.format(tmp_path), allowed)
    require_allowed_store("s3://bucket/job", allowed)
    (tmp_path / "copies").symlink_to("/")
    with pytest.raises(ConfigError, match=r"worker\.allowed_paths names"):
        require_allowed_store(inside.format(tmp_path), allowed)


def test_a_password_in_a_url_is_not_repeated() -> None:
    for url in (
        "s3://user:hidden@bucket/job",
        "s3://bucket/job?key=hidden",
        "dir::s3://me:hidden@b/j",
    ):
        for refuse in (refuse_credentials, Remote):
            with pytest.raises(ConfigError) as refused:
                refuse(url)
            assert "hidden" not in str(refused.value)
    for url in ("postgresql+psycopg//user:hidden@host/db", "nothing://user:hidden@host/db"):
        with pytest.raises(CatalogError) as failed, open_catalog(url):
            pass
        assert "hidden" not in str(failed.value)


def test_a_receipt_that_names_a_file_elsewhere_commits_nothing(job: Job) -> None:
    (job.root / "secret").write_text("mine")
    receipt = FunctionStatus("f", 1, 1, "checkpoint", 0, "", "finished", files=("../secret",))
    with pytest.raises(SaveError, match="is a link or outside of its folder"):
        commit(job.save(1), [], [receipt])


@pytest.mark.parametrize("mode", [0o646, 0o664, 0o666])
def test_source_files_are_not_trusted_at_the_request_of_others(
    tmp_path: Path, no_umask: None, mode: int
) -> None:
    commit_files(tmp_path, 1, exports={"actor": "hf_model with remote code"})
    assert allows_remote_code(tmp_path, 1, "actor")
    assert not allows_remote_code(tmp_path, 1, "critic")
    (step_folder(tmp_path, 1) / "manifest.json").chmod(mode)
    assert not allows_remote_code(tmp_path, 1, "actor")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_credentials_and_logs_of_the_stack_can_be_read_by_no_other_user(
    tmp_path: Path, no_umask: None
) -> None:
    for name in ("stack.json", "ray_token"):  # of a careless day
        (tmp_path / name).write_text("known to all")
    with environment({"RAY_AUTH_MODE": ""}):
        auth = services._ray_auth(tmp_path)
    state_file.write_state(tmp_path, StackState(ray_auth=auth))
    token = tmp_path / "ray_token"
    assert (mode_of(token), mode_of(tmp_path / "stack.json")) == (0o600, 0o600)
    assert auth["RAY_AUTH_TOKEN"] == token.read_text() != "known to all"
    (tmp_path / "stack.json").chmod(0o644)
    assert local_stack.read_state(tmp_path) == StackState(ray_auth=auth)
    assert mode_of(tmp_path / "stack.json") == 0o600
    with environment({"RAY_AUTH_MODE": ""}):
        before, _ = token.read_text(), services._ray_auth(tmp_path)
    assert token.read_text() == before
    log = tmp_path / "home" / "logs" / "one.log"
    log.parent.mkdir(parents=True)  # of a careless day
    started = daemon.start([sys.executable, "-c", ""], env={}, cwd=tmp_path, log=log)
    daemon.stop(started, 5)
    assert mode_of(log.parent) == 0o700


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_the_ray_node_of_a_stack_has_a_token_whatever_a_training_does(
    tmp_path: Path, mode: str
) -> None:
    with environment({"RAY_AUTH_MODE": mode}):
        assert services._ray_auth(tmp_path)["RAY_AUTH_MODE"] == "token"
    with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs"}):
        assert services._ray_auth(tmp_path)["RAY_AUTH_TOKEN"] == "theirs"


def test_a_server_that_answers_without_its_password_is_refused() -> None:
    version = {"/admin/version": (200, '"3.8.8"')}
    own = StackState(server=Daemon("1/1", "server.log"))
    with server(version, login="trinity-sync:secret") as url:
        services.require_refusals(StackSettings(), replace(own, api_url=url))
    with server(version) as url:
        with pytest.raises(StackError, match=f"{url} accepts requests without its password"):
            services.require_refusals(StackSettings(), replace(own, api_url=url))
        none = StackSettings(server={"password": "none"})
        services.require_refusals(none, replace(own, api_url=url))
    with pytest.raises(StackError, match=r"cannot check that the Prefect server .* requires"):
        services.require_refusals(StackSettings(), replace(own, api_url=url))
    with (
        server({}) as url,
        pytest.raises(StackError, match=r"cannot check that the Ray cluster .* requires"),
    ):
        services.accepts_calls(url.removeprefix("http://").removesuffix("/api"))


def test_no_other_user_may_write_where_the_stack_looks_for_its_modules(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    with (
        pytest.raises(StackError, match="nothing answers"),
        environment({"PREFECT_API_URL": "http://127.0.0.1:9/api"}),
    ):
        local_stack.up(Settings(home=home))
    assert mode_of(home) == 0o755
    if os.getuid():
        pytest.skip("only root can give folders away")
    os.chown(home, 12345, 12345)
    with pytest.raises(StackError, match="others than this user may write home"):
        local_stack.up(Settings(home=home))


def test_a_home_below_another_users_folder_of_a_shared_one_is_refused(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give folders away")
    tmp_path.chmod(0o1777)  # as /var/tmp
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(StackError, match="belongs to another user"):
        services.make_home(tmp_path / "theirs/host")
    assert list((tmp_path / "theirs").iterdir()) == []
    services.make_home(tmp_path / "own/host")


def test_the_server_asks_for_a_password_that_only_its_user_can_read_unless_it_is_told_not_to(
    tmp_path: Path, no_umask: None
) -> None:
    settings = Settings(home=tmp_path)
    with environment({}):
        first = services._server_auth(settings, StackSettings(), StackState())
        assert services._server_auth(settings, StackSettings(), StackState()) == first
        without = StackSettings(server={"password": "none"})
        assert services._server_auth(settings, without, StackState()) == ""
    file = tmp_path / services.PASSWORD_FILE
    assert (file.read_text(), mode_of(file)) == (first, 0o600)
    user, _, password = first.partition(":")
    assert (user, len(password)) == ("trinity-sync", 64)


def test_a_stack_that_others_may_have_written_is_not_touched(tmp_path: Path) -> None:
    state = StackState(ray_folder=str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    state_file.write_state(tmp_path, state)
    of_others(tmp_path / "stack.json")
    with pytest.raises(StackError, match="others may write it"):
        local_stack.down(Settings(home=tmp_path))
    assert (tmp_path / "mine").exists()
