"""Jobs for tests: a root in a temporary folder, a spool in real shared memory."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.job import Job
from tests.support.waiting import until
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.fs import file_system as memory
from trinity_sync.settings import Settings

if TYPE_CHECKING:
    import boto3

SECRET = "not-to-be-seen"
"""What a store is to be reached with, and no message may hold."""

Open = Callable[..., CheckpointCoordinator]
"""Makes the coordinator of a rank."""


class Runs:
    """A pickle that makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def job(tmp_path: Path, spool_folder: Path) -> Iterator[Job]:
    with closing(Job.open(tmp_path / "ckpts", spool_folder)) as job:
        yield job


@pytest.fixture
def settings(spool_folder: Path, tmp_path: Path) -> Settings:
    """Settings of a node with a spool and a home of its own."""
    return Settings(spool=spool_folder, home=tmp_path / "home")


@pytest.fixture
def coordinator_of(job: Job, spool_folder: Path, tmp_path: Path) -> Iterator[Open]:
    """Coordinators of the job's ranks, with no server to ask: the test commits by itself."""
    settings = Settings(spool=spool_folder, home=tmp_path)
    with ExitStack() as open_ones:

        def make(
            rank: int = 0, world_size: int = 1, run_key: str = "run", **others: Any
        ) -> CheckpointCoordinator:
            made = CheckpointCoordinator(
                job.root,
                rank=rank,
                world_size=world_size,
                run_key=run_key,
                settings=settings,
                **others,
            )
            open_ones.callback(made.close, timeout=0)
            return made

        yield make


@pytest.fixture
def no_umask() -> Iterator[None]:
    """New files may be written by all users, unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # memory of it may be mapped


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below that of this process, whose memory can be limited by `set_limit`."""
    for _, _, own in memory._list_groups():
        try:
            (made := own / f"trinity_sync-test-{os.getpid()}").mkdir()  # others have theirs
            set_limit(made, 1 << 40)
        except OSError:
            continue
        yield made
        until(lambda: not (made / "cgroup.procs").read_text(), "its processes to end")
        made.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def set_limit(group: Path, nbytes: int) -> None:
    """Set the memory limit of a control group."""
    files = [group / names[0] for names in memory._FILES.values()]
    next(filter(Path.exists, files)).write_text(str(nbytes))


@pytest.fixture(scope="module")
def s3() -> "Iterator[boto3.client]":
    """A server that speaks S3, which the environment names."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        yield boto3.client("s3")
    server.stop()


@pytest.fixture
def bucket(s3: "boto3.client", request: pytest.FixtureRequest) -> str:
    name = f"bucket-{abs(hash(request.node.name))}"
    s3.create_bucket(Bucket=name)
    return name
