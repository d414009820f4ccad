"""``python -m benchmarks.weights``: the time until new weights are in a reader's parameters.

From the trainer's call to the end of the copy in another process of the node, next to two warm
copies of the same bytes, which is the lower bound, and next to Trinity's way: gather on rank 0,
send the dict to the Synchronizer, get it there, ``load_state_dict``. Prints a table and writes
``benchmarks/results/weights.json``; ``QUICK=1`` takes 100 MB instead of 1 GB.
"""

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Samples, records_of, write
from benchmarks.report import WIDTH
from benchmarks.training import Size

if TYPE_CHECKING:
    import torch

QUICK = bool(os.environ.get("QUICK"))
SIZE = Size(100 << 20 if QUICK else 1 << 30, 300)
TURNS = 3 if QUICK else 7
READERS = 8
RESULTS = Path(__file__).parent / "results" / "weights.json"
TARGETS = {
    ("ours", "in the reader"): ("two warm copies", 1.5),
    ("ours", "in the reader "): ("Trinity's way", 0.1),
    ("ours", "stall after a save"): (None, 0.005),
    (f"ours, {READERS} readers", "in the reader"): ("ours", 2.0),
}


def model() -> "dict[str, torch.Tensor]":
    import torch

    numel = SIZE.nbytes // SIZE.tensors // 2
    return {f"layer.{n}.weight": torch.ones(numel).bfloat16() for n in range(SIZE.tensors)}


class Dict:
    """Trinity's Synchronizer, reduced to a state dict in memory."""

    def __init__(self) -> None:
        self._state: Any = None

    def set_model_state_dict(self, state: Any) -> None:
        """Keep the dict."""
        self._state = state

    def get_model_state_dict(self) -> Any:
        """Return the dict."""
        return self._state


class Piped:
    """Tells one reader of versions, through its pipe."""

    node = None
    """All images are on this node."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._latest: Any = None

    def latest(self) -> Any:
        """Return the version that was received last."""
        return self._latest

    async def wait_newer(self, than: Any, timeout_s: float | None) -> Any:
        """Return the next version."""
        self._latest = self._pipe.recv()
        return self._latest

    def set_serving(self, reader: str, step: int, run: int) -> None:
        """Ignore that a reader has a version."""


def read(pipe: Any, address: str, told_by: tuple[Any, Any] | None) -> None:
    """Run a process with parameters of its own that loads on request and reports when it was done.

    The pipe sends "ours", a step to load by Trinity's way, or None to end. ``told_by`` are Ray
    actors at ``address`` that know versions, and Trinity's dict; without them the pipe tells of
    versions.
    """
    import psutil
    import torch

    from trinity_sync.weights.reader import WeightReader

    torch.set_num_threads(os.cpu_count() or 1)
    state = model()
    if told_by:
        import ray

        ray.init(address, log_to_driver=False)
        told_by = ray.cloudpickle.loads(told_by)  # handles, which belong to a joined process
    reader = WeightReader(told_by[0] if told_by else Piped(pipe), name="reader")
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        if command == "ours":
            version = asyncio.run(reader.wait_newer())
            step = reader.load_into(state, version)
        else:
            assert told_by is not None
            step = command
            found = ray.get(told_by[1].get_model_state_dict.remote())
            for name, value in found.items():
                state[name].copy_(value)
        done = time.perf_counter()
        values = {float(value[-1]) for value in state.values()}
        assert values == {float(step)}, f"step {step} was to be loaded, and {values} is there"
        pipe.send((done, psutil.Process().memory_full_info().uss))


def measure(root: Path, spool: Path) -> Samples:
    """Return all figures, in seconds."""
    import ray
    import torch

    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.client.saver_control import SaveTrigger
    from trinity_sync.settings import Settings
    from trinity_sync.snapshot.ticket import free_slot
    from trinity_sync.tensors.memcpy import copy_pieces
    from trinity_sync.weights.publisher import Publisher
    from trinity_sync.weights.synchronizer import Synchronizer
    from trinity_sync.weights.versions import make_shard

    class AsksNobody(SaveTrigger):
        """A trigger that requests no flow run: saves are staged only."""

        def submit(self, request: Any) -> None:
            pass

    torch.set_num_threads(os.cpu_count() or 1)
    samples: Samples = {}

    def note(system: str, metric: str, seconds: float) -> None:
        samples.setdefault((system, metric), []).append(seconds)

    state, other = model(), model()
    pieces = [
        (other[name].data_ptr(), value.data_ptr(), value.nbytes) for name, value in state.items()
    ]

    def two_copies() -> None:
        began = time.perf_counter()
        copy_pieces(pieces)
        copy_pieces(pieces)
        note("two warm copies", "in the reader", time.perf_counter() - began)

    settings = Settings(spool=spool, slot_wait_s=0.0)
    synchronizer = Synchronizer.get_actor(root=root)
    book = ray.remote(num_cpus=0)(Dict).remote()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._subclasses.fake_tensor", "trinity_sync.weights.reader"])

    def start(told_by: Any = None) -> Any:
        mine, theirs = context.Pipe()
        address = ray.get_runtime_context().gcs_address
        context.Process(target=read, args=(theirs, address, told_by), daemon=True).start()
        mine.recv()
        return mine

    step = 0

    def publish(told: Any) -> None:
        """Upload the next step, and tell of it."""
        published, _ = saves.upload(step, lambda: state)
        assert published is not None
        if told is publisher:
            publisher.publish(published)
            return
        slot = next(slot for slot, tag in saves.spool.list_versions("actor") if tag == published)
        version = make_shard(published, slot, root, "", "here")
        for pipe in told:
            pipe.send(version)

    def next_step() -> None:
        nonlocal step
        step += 1
        for value in state.values():
            value.fill_(step)

    def round_trip(system: str, readers: list[Any], told: Any) -> list[int]:
        next_step()
        for pipe in readers:
            pipe.send("ours")
        time.sleep(0.2)  # they wait by now
        began = time.perf_counter()
        publish(told)
        note(system, "stall", time.perf_counter() - began)
        answers = [pipe.recv() for pipe in readers]
        note(system, "in the reader", max(done for done, _ in answers) - began)
        return [used for _, used in answers]

    with closing(
        CheckpointCoordinator(root, settings=settings, trigger=AsksNobody(settings))
    ) as saves:
        publisher = Publisher(synchronizer, root, saves.spool)
        alone = start(ray.cloudpickle.dumps((synchronizer, book)))
        for _ in range(3):
            round_trip("warm-up", [alone], publisher)
        for _ in range(TURNS):
            two_copies()
            round_trip("ours", [alone], publisher)
        for _ in range(TURNS):
            next_step()
            saves.save(step, {"model": state}, kind="state_dict")
            began = time.perf_counter()
            publish(publisher)
            note("ours", "stall after a save", time.perf_counter() - began)
            for sealed in saves.spool.tickets()[0]:  # as if it were committed
                free_slot(sealed.slot, sealed.ticket.image)
        publisher.wait()
        for _ in range(TURNS):
            next_step()
            began = time.perf_counter()
            gathered = {name: value.cpu().clone() for name, value in state.items()}
            ray.get(book.set_model_state_dict.remote(gathered))
            note("Trinity's way", "stall", time.perf_counter() - began)
            del gathered
            alone.send(step)
            note("Trinity's way", "in the reader", alone.recv()[0] - began)
        alone.send(None)
        ray.kill(book)
        readers = [start() for _ in range(READERS)]
        many = f"ours, {READERS} readers"
        for _ in range(3):
            round_trip("warm-up", readers, readers)
        for _ in range(TURNS):
            used = round_trip(many, readers, readers)
        for pipe in readers:
            pipe.send(None)
        slots = sum(p.stat().st_blocks * 512 for p in saves.spool.folder.glob("*.slot"))
        note(many, "shared memory a byte", slots / SIZE.nbytes)
        note(many, "memory of a reader a byte", max(used) / SIZE.nbytes)
    return {key: values for key, values in samples.items() if key[0] != "warm-up"}


def main() -> None:
    import ray
    from rich.console import Console
    from rich.table import Table

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as root,
        tempfile.TemporaryDirectory(prefix="trinity_sync-bench-", dir="/dev/shm") as spool,
    ):
        here = str(Path(__file__).parents[1])
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=3 * SIZE.nbytes,
            include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": here}},
        )
        try:
            samples = measure(Path(root), Path(spool))
        finally:
            ray.shutdown()
    table = Table(title=f"{SIZE.nbytes / 1e9:.2f} GB in {SIZE.tensors} tensors")
    for column in ("", "", "median", "lowest", "highest", "beside", "ratio", "target"):
        table.add_column(column, justify="right" if column else "left")
    for (system, metric), values in samples.items():
        median = statistics.median(values)
        shown = [
            f"{v:.2f}" if "byte" in metric else f"{1e3 * v:,.1f} ms"
            for v in (median, min(values), max(values))
        ]
        rows = [t for (s, m), t in TARGETS.items() if (s, m.strip()) == (system, metric)]
        for beside, target in rows or [(None, 0.0)]:
            if beside:
                ratio = median / statistics.median(samples[beside, metric])
                table.add_row(system, metric, *shown, beside, f"{ratio:.2f}", f"<= {target}")
            else:
                limit = f"< {1e3 * target:.0f} ms" if target else ""
                table.add_row(system, metric, *shown, "", "", limit)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    if not QUICK:
        write(RESULTS, records_of("weights", SIZE, samples), {})


if __name__ == "__main__":
    main()
