"""A small Ray node for the tests of weight sync."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.conftest import QUIET, environment
from trinity_sync import Synchronizer
from trinity_sync.weights.sync_barrier import SyncSettings

ASK_S = 240.0


def ask(reference: Any) -> Any:
    return ray.get(reference, timeout=ASK_S)


@pytest.fixture(scope="package")
def ray_node() -> Iterator[None]:
    """A Ray node of its own, whatever stack the session has, until the folder's last test."""
    own = {"PYTHONPATH": str(Path.cwd()), "RAY_memory_monitor_refresh_ms": "0"}
    with environment(QUIET | own):  # whatever memory others take, no actor is killed for it
        small = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
        ray.init("local", log_to_driver=False, **small)
    yield  # without that environment: a stack may begin before this ends
    ray.shutdown()


@pytest.fixture
def namespace(tmp_path: Path) -> str:
    return f"test-{tmp_path.name}"


@pytest.fixture
def synchronizer(ray_node: None, root: Path, namespace: str) -> Iterator[Any]:
    """The Synchronizer of the job at ``root``."""
    actor = Synchronizer.get_actor(
        namespace=namespace, root=root, settings=SyncSettings(timeout_s=30)
    )
    ask(actor.latest.remote())
    yield actor
    ray.kill(actor)
