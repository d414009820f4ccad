"""Ray nodes on this machine."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster


class _Cluster(Cluster):
    """Keeps the handler of SIGTERM of the first node, at whose exit all nodes end."""

    def add_node(self, **named: Any) -> Any:
        before, is_first = signal.getsignal(signal.SIGTERM), not self.list_all_nodes()
        node = super().add_node(**named)
        if not is_first:
            signal.signal(signal.SIGTERM, before)
        return node


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """A cluster without nodes, to which the block adds them, and what this process joins of it.

    All that Ray writes is in a folder of its own, also the address of the head, which any program
    of the machine would join, and which Ray cannot write where it has never run.
    """
    before = signal.getsignal(signal.SIGTERM)
    with (
        tempfile.TemporaryDirectory(prefix="trinity_sync-ray-", dir="/tmp") as scratch,
        pytest.MonkeyPatch.context() as patch,
    ):
        Path(scratch, "ray").mkdir()
        patch.setenv("RAY_TMPDIR", scratch)
        made = _Cluster()
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            signal.signal(signal.SIGTERM, before)
