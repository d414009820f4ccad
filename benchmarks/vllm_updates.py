"""``python -m benchmarks.vllm_updates``: the time of an update of a running vLLM engine.

From the trainer's call to the first token of the new version, compared with what is done without
us: files that the engine reloads, and Ray's object store. All take turns, so a busy machine affects
them alike. The lower bound is vLLM's own load of tensors that its worker holds already, and a copy
of the model. ``TESTS_STACK`` names the ``bin`` of a stack's environment, for versions from commits.
Prints tables and writes ``benchmarks/results/vllm.json``; ``QUICK=1`` takes the tiny model only,
few times, and writes nothing.
"""

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.measure import Record, Samples, machine, records_of, write
from benchmarks.report import WIDTH
from benchmarks.resources import cpu_seconds
from benchmarks.training import Size
from benchmarks.vllm_table import COLUMNS, COMMIT, COPY, FLOOR, OURS, rows_of
from benchmarks.vllm_trainer import CASES, PROMPT, WITHOUT_NUMPY, Case, Places, Sent, run_trainer

QUICK = bool(os.environ.get("QUICK"))
WARM_UP, TURNS, MEMORY_TURNS = 2, 3 if QUICK else 7, 1
SETTLE_S = 0.2
"""Seconds for threads that still spin after the trainer has changed its weights."""
INTERVAL_S = 0.001
"""Seconds between two looks at a worker's memory."""
RESULTS = Path(__file__).parent / "results" / "vllm.json"
WAYS = (OURS, "files, fsync", "files", "files in memory", "Ray, tensors", "Ray, arrays", FLOOR)
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends an actor for the memory of others
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Loads:
    """Methods that vLLM adds to its worker."""

    def join_ray(self, address: str) -> None:
        """Join the trainer's Ray node."""
        import ray

        ray.init(address, namespace="bench", log_to_driver=False)
        self.book = ray.get_actor("book")

    def load_from_ray(self, dtype: str) -> None:
        """Load the version that the object store holds."""
        import ray

        state = ray.get(ray.get(self.book.held.remote())[0])

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    value = torch.from_numpy(value)
                    wanted = getattr(torch, dtype)
                    if value.dtype == WITHOUT_NUMPY.get(wanted):
                        value = value.view(wanted)
                yield name, value

        self.reload_weights(weights_iterator=tensors())  # type: ignore[attr-defined]

    def keep(self, folder: str) -> None:
        """Copy the tensors of a folder into memory of this process, always the same."""
        from safetensors.torch import load_file

        found = load_file(Path(folder) / "model.safetensors")
        if not hasattr(self, "kept"):
            self.kept = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        for name, tensor in found.items():
            self.kept[name].copy_(tensor)

    def load_kept(self) -> None:
        """Load the tensors that `keep` has copied."""
        self.reload_weights(weights_iterator=iter(self.kept.items()))  # type: ignore[attr-defined]

    def trim(self) -> int:
        """Return free memory to the system; return this process's id."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return os.getpid()


class Engine:
    """An engine, its trainer, and the ways between them."""

    def __init__(self, case: Case, places: Places, opened: ExitStack) -> None:
        from vllm import LLM, SamplingParams

        from trinity_sync.integrations.vllm import VLLMUpdater

        self.with_ray = find_spec("ray") is not None
        self._case, self._places, self._step = case, places, 0
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=run_trainer, args=(theirs, case, places, self.with_ray))
        process.start()
        theirs.close()  # so that the trainer's end is noticed
        opened.callback(process.join, 60)
        opened.callback(self._end_trainer)
        self._trainer_pid: int = process.pid or 0
        self.nbytes, self.tensors, address = self._pipe.recv()
        folder = places.root.parent / "model"
        self._ask("save_model", folder)
        self._llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype=case.dtype,
            max_model_len=128,
            block_size=32,
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            use_tqdm_on_load=False,
            weight_transfer_config={"backend": "trinity_sync"},
            worker_extension_cls="benchmarks.vllm_updates.Loads",
        )
        opened.callback(self._llm.llm_engine.engine_core.shutdown)
        self._updater = opened.enter_context(VLLMUpdater(self._llm, places.root))
        self._greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._updates: dict[str, Callable[[int], Any]] = {
            OURS: self._update,
            COMMIT: self._update_from_commit,
            "files, fsync": lambda step: self._reload(places.disk, step),
            "files": lambda step: self._reload(places.disk, step),
            "files in memory": lambda step: self._reload(places.memory, step),
            "Ray, tensors": lambda _: self._call("load_from_ray", case.dtype),
            "Ray, arrays": lambda _: self._call("load_from_ray", case.dtype),
            FLOOR: lambda _: self._call("load_kept"),
        }
        self._worker: int = self._llm.collective_rpc("trim")[0]
        if self.with_ray:
            self.measure(OURS)  # its reader is made before this process is one of Ray's
            self._llm.collective_rpc("join_ray", args=(address,))

    def measure(self, way: str) -> dict[str, float]:
        """Send a version and generate with it; return seconds and bytes by metric."""
        self._step += 1
        tokens = self._ask("prepare")
        if way == FLOOR:
            self._ask("send", "files in memory", self._step)
            folder = str(self._places.memory / str(self._step))
            self._llm.collective_rpc("keep", args=(folder,))
        time.sleep(SETTLE_S)
        cpu = self._cpu_seconds(way)
        if way == FLOOR:
            sent = Sent(time.perf_counter(), 0.0, 0)
        else:
            sent = self._ask("send", way, self._step)
        told = time.perf_counter()
        self._updates[way](self._step)
        updated = time.perf_counter()
        [answer] = self._llm.generate({"prompt_token_ids": PROMPT}, self._greedy, use_tqdm=False)
        ended = time.perf_counter()
        used = self._cpu_seconds(way) - cpu
        token = answer.outputs[0].token_ids[0]
        if token not in tokens:
            raise RuntimeError(f"{way}: {token} is no first token of version {self._step}")
        found = {
            "first token": ended - sent.began,
            "stall": sent.stall_s,
            "update": updated - told,
            "token": ended - updated,
            "cpu": used,
            "written": float(sent.nbytes),
        }
        print(way, {name: round(value, 4) for name, value in found.items()}, file=sys.stderr)
        return found

    def measure_memory(self, way: str) -> float:
        """Return the peak of the worker's private memory during an update, above that before."""
        self._llm.collective_rpc("trim")
        with _peak_of(self._worker) as peak:
            self.measure(way)
        return peak[0]

    def copy_once(self) -> float:
        """Return the seconds of a warm copy of the model."""
        return float(self._ask("copy_once"))

    def _end_trainer(self) -> None:
        with suppress(OSError):  # it has ended
            self._pipe.send(None)

    def _ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        self._llm.reset_prefix_cache()
        self._llm.collective_rpc(method, args=arguments, kwargs=named)

    def _reload(self, folder: Path, step: int) -> None:
        self._call("reload_weights", weights_path=str(folder / str(step)))

    def _update(self, step: int) -> None:
        self._updater.update(min_step=step)

    def _update_from_commit(self, step: int) -> None:
        from trinity_sync.settings import Settings
        from trinity_sync.snapshot.ticket import PUBLISHED_SUFFIX

        self._ask("wait_committed")
        for tag in Settings().spool.rglob(f"*{PUBLISHED_SUFFIX}"):
            tag.unlink()  # as on another node, which sees the root alone
        self._updater.update(min_step=step)

    def _cpu_seconds(self, way: str) -> float:
        """Return the CPU time of trainer, engine and this process; Ray's, where it takes part."""
        trainer = psutil.Process(self._trainer_pid)
        if way.startswith("Ray"):
            return cpu_seconds([os.getpid()])
        trees = {p.pid for p in trainer.children(recursive=True)}
        mine = psutil.Process().children(recursive=True)
        alone = [psutil.Process(), *(p for p in mine if p.pid not in trees)]
        return sum(sum(p.cpu_times()[:2]) for p in alone)


@contextmanager
def _peak_of(pid: int) -> Iterator[list[float]]:
    """Watch the anonymous memory of a process; yield its peak in bytes above that before."""
    status = Path(f"/proc/{pid}/status")
    over = threading.Event()

    def look() -> int:
        line = next(line for line in status.read_text().splitlines() if line[:7] == "RssAnon")
        return int(line.split()[1]) << 10

    before = look()
    peak = [0.0]

    def watch() -> None:
        while not over.wait(INTERVAL_S):
            peak[0] = max(peak[0], float(look() - before))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def measure(case: Case, with_stack: bool) -> tuple[Size, Samples]:
    """Return all figures of a case, in seconds and bytes."""
    samples: Samples = {}

    def note(way: str, metric: str, value: float) -> None:
        samples.setdefault((way, metric), []).append(value)

    with ExitStack() as opened:
        folder, memory = (
            Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=where)))
            for where in (None, "/dev/shm")
        )
        places = Places(folder / "job", folder / "versions", memory / "versions")
        places.disk.mkdir()
        places.memory.mkdir()
        own = {
            "TRINITY_SYNC_SPOOL": str(memory / "spool"),
            "TRINITY_SYNC_HOME": str(folder / "home"),
        }
        os.environ |= own
        engine = Engine(case, places, opened)
        ways = [way for way in WAYS if engine.with_ray or not way.startswith("Ray")]
        for turn in range(WARM_UP + TURNS):
            first = turn % len(ways)  # what one leaves behind, such as a warm heap, hits all alike
            for way in [*ways[first:], *ways[:first]]:
                found = engine.measure(way)
                if turn >= WARM_UP:
                    for metric, value in found.items():
                        note(way, metric, value)
            if turn >= WARM_UP:
                note(COPY, "first token", engine.copy_once())
        for _ in range(MEMORY_TURNS):
            for way in ways:
                if way != FLOOR:  # what it keeps is not the load's
                    note(way, "memory", engine.measure_memory(way))
        if with_stack:
            with _stack():
                for turn in range(1 + TURNS):
                    for metric, value in engine.measure(COMMIT).items():
                        if turn:
                            note(COMMIT, metric, value)
        order = {way: place for place, way in enumerate((*WAYS, COMMIT, COPY))}
        ordered = dict(sorted(samples.items(), key=lambda each: order[each[0][0]]))
        return Size(engine.nbytes, engine.tensors), ordered


@contextmanager
def _stack() -> Iterator[None]:
    """Run the stack whose environment ``TESTS_STACK`` names."""
    command = f"{os.environ['TESTS_STACK']}/trinity-sync"
    env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    subprocess.run([command, "up"], env=env, check=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run([command, "down", "--yes"], env=env, check=True, stdout=subprocess.DEVNULL)


def show(case: Case, size: Size, samples: Samples) -> None:
    """Print the medians of a case."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{case.name}: {size.nbytes / 1e6:,.1f} MB in {size.tensors} tensors")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for row in rows_of(records_of(case.name, size, samples)):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def main() -> None:
    """Measure the cases that are named, or all; print, and write."""
    os.environ |= QUIET
    with_stack = bool(os.environ.get("TESTS_STACK"))
    absent = {"vLLM's ipc and nccl": "they need GPUs"}
    if not with_stack:
        absent[COMMIT] = "TESTS_STACK names no stack"
    if find_spec("ray") is None:
        absent["Ray"] = "not installed"
    records: list[Record] = []
    wanted = sys.argv[1:] or [case.name for case in CASES[: 1 if QUICK else None]]
    for case in CASES:
        if case.name in wanted:
            size, samples = measure(case, with_stack)
            show(case, size, samples)
            records += records_of(case.name, size, samples)
            if not QUICK:
                write(RESULTS, records, absent)
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    print(machine())


if __name__ == "__main__":
    main()
