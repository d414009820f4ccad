"""What a restart asks of the file systems, from 8 ranks to 1,024: calls that look up a path.

::

    python -m benchmarks.restarts [RANKS ...]      # QUICK=1: 64 ranks at most

Real are a committed step of that many ranks, with three files for each of them and a manifest, and
the code of every rank: `CheckpointCoordinator.of_process_group`, `latest_step` and `load`.
Simulated is the process group: the ranks are threads, of which one works at a time, and their
collectives exchange copies. Eight ranks are a node, with a spool of its own.

Counted are stats, opens and listings of folders, of the root and of the spools, beyond those on the
rank's own files. Calls that grow with the ranks, other than on rank 0, are an error.
"""

import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.path_calls import watch_path_calls

SIZES = (8, 64) if os.environ.get("QUICK") else (8, 64, 1024)
COMPONENTS = ("model", "optim", "extra_state")
RANKS_OF_A_NODE = 8
MOST = 20
"""Calls that a rank may make in `latest_step` and `load`, beyond the opens of its files."""
PHASES = ("of_process_group", "latest_step", "load", "close")


class Ranks:
    """A process group whose ranks are threads of this process, of which one works at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.at_work = 0
        """The rank that works: work of its own threads counts as its work."""
        self._mine = threading.local()
        self._baton = threading.Lock()
        self._barrier = threading.Barrier(number)
        self._sent: list[bytes] = [b""] * number

    def run(self, body: Callable[[int], object]) -> list[Exception]:
        """Run a function on all ranks, with ``torch.distributed`` as in them; return errors."""
        import torch.distributed as dist

        failed: list[Exception] = []

        def work(rank: int) -> None:
            self._mine.rank = rank
            with self._baton:
                self.at_work = rank
                try:
                    body(rank)
                except Exception as error:
                    failed.append(error)

        functions: dict[str, Any] = {
            "is_initialized": lambda: True,
            "get_world_size": lambda: self.number,
            "get_rank": lambda: self._mine.rank,
            "all_gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
        }
        with mock.patch.multiple(dist, **functions):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.number)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return failed

    def _gather(self, everyone: list[Any], mine: Any) -> None:
        self._sent[self._mine.rank] = pickle.dumps(mine)
        self._meet()
        everyone[:] = map(pickle.loads, self._sent)
        self._meet()

    def _broadcast(self, objects: list[Any], src: int) -> None:
        if self._mine.rank == src:
            self._sent[src] = pickle.dumps(objects)
        self._meet()
        objects[:] = pickle.loads(self._sent[src])
        self._meet()

    def _meet(self) -> None:
        self._baton.release()
        self._barrier.wait()
        self._baton.acquire()
        self.at_work = self._mine.rank


@dataclass(frozen=True)
class Restart:
    """The calls of a restart."""

    ranks: int
    calls: dict[str, list[int]]
    """Calls of each rank by phase, without those on its own files."""
    own: list[int]
    """Calls of each rank on its own files."""
    leases: int

    def count(self, rank: int) -> int:
        """Return the calls of a rank in `latest_step` and `load`."""
        return self.calls["latest_step"][rank] + self.calls["load"][rank]

    @property
    def row(self) -> str:
        """The restart as a row of `HEAD`."""
        others = range(1, self.ranks)
        cells = (
            self.ranks,
            sum(self.own) // self.ranks,
            self.count(0),
            max(map(self.count, others)),
            round(sum(map(self.count, range(self.ranks))) / self.ranks, 1),
            max(self.calls["of_process_group"][rank] for rank in others),
            self.leases,
        )
        return f"| {' | '.join(f'{cell:,}' for cell in cells)} |"

    @property
    def is_linear(self) -> bool:
        """Whether no rank makes more calls than it may, and one lease was enough."""
        mean = sum(map(self.count, range(self.ranks))) / self.ranks
        most = max(map(self.count, range(1, self.ranks)))
        return max(mean, most) <= MOST and self.leases == 1


HEAD = """\
| ranks | on own files | rank 0 | other ranks, at most | mean | `of_process_group` | leases |
|---|---|---|---|---|---|---|"""


def commit_step(root: Path, ranks: int, step: int = 1) -> None:
    """Commit a step of so many ranks: the same small image for each rank and component."""
    from benchmarks.simulated import make_image
    from trinity_sync.fs.direct_io import digest_parts
    from trinity_sync.layout import SERVES_AS, shard_file, step_folder
    from trinity_sync.storage.manifest import FileRecord, Manifest, write_manifest
    from trinity_sync.storage.runs import open_run

    image = make_image()
    digest = digest_parts((memoryview(image),))
    folder = step_folder(root, step)
    (folder / "actor").mkdir(parents=True)
    records = []
    for rank in range(ranks):
        for component in COMPONENTS:
            path = f"actor/{shard_file(component, ranks, rank)}"
            (folder / path).write_bytes(image)
            of = ("actor", component, rank, ranks)
            records.append(FileRecord(path, len(image), digest, *of))
    run = open_run(root, "first", 0)
    kinds = SERVES_AS["checkpoint"]
    write_manifest(root, Manifest("job", run.number, step, kinds, tuple(records), (), 1.7e9))


def restart(folder: Path, ranks: int) -> Restart:
    """Load a step on all ranks, and count their calls; ``folder`` is empty."""
    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.settings import Settings
    from trinity_sync.snapshot.slot_pool import BESIDE

    root = folder / "ckpts"
    root.mkdir()
    commit_step(root, ranks)
    group = Ranks(ranks)
    phases = [PHASES[0]] * ranks
    calls = {phase: [0] * ranks for phase in PHASES}
    own = [0] * ranks
    leases = set[str]()

    def tell(kind: str, path: str) -> None:
        if threading.current_thread().name == BESIDE and not Path(path).is_relative_to(root):
            return  # touches memory for the first save, beside the training
        rank = group.at_work
        if path.endswith(f"_rank_{rank}.pt"):
            own[rank] += 1
        else:
            calls[phases[rank]][rank] += 1
        if kind == "open" and "/.trinity_sync/leases/" in path:
            leases.add(path)

    def resume(rank: int) -> None:
        node = f"node{rank // RANKS_OF_A_NODE}"
        settings = Settings(spool=folder / node, node=node, home=folder)
        saves = CheckpointCoordinator.of_process_group(root, settings=settings)
        phases[rank] = PHASES[1]
        step = saves.latest_step()
        assert step is not None
        phases[rank] = PHASES[2]
        assert set(saves.load(step)) == {*COMPONENTS}
        phases[rank] = PHASES[3]
        saves.close(timeout=0)

    with watch_path_calls(tell, folder):
        failed = group.run(resume)
    for error in failed:
        raise error
    return Restart(ranks, calls, own, len(leases))


def main() -> None:
    sizes = [int(each) for each in sys.argv[1:]] or SIZES
    print(HEAD)
    wrong = False
    for ranks in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-restarts-", dir="/dev/shm") as folder:
            found = restart(Path(folder), ranks)
        print(found.row, flush=True)
        wrong |= not found.is_linear
    said = "too many calls, or leases" if wrong else "no calls that grow with the ranks, one lease"
    print(f"{said}: a rank may make {MOST} calls, rank 0 as many for each rank")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
