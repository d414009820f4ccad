"""Try what trinity_sync promises, on this machine: ``python -m trinity_sync.selftest``.

Jobs of its own save from the CPU and from each accelerator, are killed, and have their weights read
by a second process. A figure is a ratio to a limit of this machine that is measured beside it. All
of it goes into a JSON file for bug reports. Under ``torchrun``, all ranks save and load their own
shards instead.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from trinity_sync import CheckpointCoordinator, Checkpoints, SaveFailedError, Settings, WeightReader
from trinity_sync.weights.broadcast import receive_weights, send_weights
from trinity_sync.weights.weight_group import WeightGroupHost, join_weight_group

ANSWER_S = 120.0
"""Seconds after which what has not answered has failed."""
TURNS = 3
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """How a check ended."""

    is_ok: bool
    found: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Try:
    """What the checks of a device have in common."""

    root: Path
    device: str
    nbytes: int

    @property
    def backend(self) -> str | None:
        """Back end of a weight group: on the CPU never NCCL, whatever GPUs there are."""
        return "gloo" if self.device == "cpu" else None

    def make_state(self, step: int) -> State:
        """Return the same tensors in each process: of each kind of layout, and a large one."""
        random = torch.Generator().manual_seed(step)
        large = torch.randn(self.nbytes // 4, generator=random, device="cpu")
        odd = torch.randint(-100, 100, (7, 5), generator=random, device="cpu")
        state = {
            "large": large,
            "transposed": large[:4096].view(64, 64).t(),
            "every other": large[:4096:2],
            "scalar": large[0],
            "empty": large[:0],
        }
        dtypes = (torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool)
        state |= {str(dtype): odd.to(dtype) for dtype in dtypes}
        return {name: tensor.to(self.device) for name, tensor in state.items()}


def check_save(of: Try) -> Result:
    """Save some steps, and load what was committed."""
    stalls, seconds = [], []
    with CheckpointCoordinator(of.root) as saves:
        for step in range(1, TURNS + 2):
            state = of.make_state(step)
            began = time.perf_counter()
            handle = saves.save(step, {"model": state})
            handle.wait(ANSWER_S)
            stalls.append(handle.stall_s)
            seconds.append(time.perf_counter() - began)
        loaded = Checkpoints(of.root).load(step)["model"]
    same = _digest(loaded) == _digest(state)
    stall, durable = (statistics.median(each[1:]) for each in (stalls, seconds))  # slots are warm
    copy, write = _measure_copy(state["large"]), _measure_write(state["large"], of.root)
    return Result(
        same,
        f"stall {stall / copy:.2f} of a copy ({copy:.3f} s), durable {durable / write:.2f} of a "
        f"write with fsync ({write:.3f} s)" + ("" if same else "; what was loaded differs"),
        {"stall_s": stall, "copy_s": copy, "durable_s": durable, "write_s": write},
    )


def check_overlap(of: Try) -> Result:
    """Change a state while it is copied: it is saved as it was, or not at all.

    With a digest taken at the call, which alone finds a change that ends after the copy.
    """
    state = of.make_state(20)
    before = _digest(state)
    with ExitStack() as opened:
        settings = Settings(overlap="check")
        saves = opened.enter_context(closing(CheckpointCoordinator(of.root, settings=settings)))
        saves.save(20, {"model": {"before": state["scalar"]}}).wait(ANSWER_S)
        handle = saves.save(21, {"model": state}, overlap=True)
        state["large"] += 1
        try:
            handle.wait(ANSWER_S)
        except SaveFailedError:
            return Result(True, "the change was found, and nothing was saved")
    same = _digest(Checkpoints(of.root).load(21)["model"]) == before
    return Result(same, "saved " + ("as it was" if same else "torn"))


def _save_and_die(of: Try) -> None:
    CheckpointCoordinator(of.root).save(30, {"model": of.make_state(30)})
    os.kill(os.getpid(), signal.SIGKILL)


def check_kill(of: Try) -> Result:
    """Kill a process right after its save, and resume."""
    with suppress(BrokenProcessPool):  # it was killed
        _in_process(_save_and_die, of)
    with CheckpointCoordinator(of.root) as saves:
        step = saves.latest_step(settle_s=ANSWER_S)
        if step != 30:
            return Result(False, f"its save was not committed within {ANSWER_S:g} s")
        state = saves.load(step)["model"]
        same = _digest(state) == _digest(of.make_state(step))
        saves.save(31, {"model": state}).wait(ANSWER_S)  # into the slot of the dead process
    return Result(same, "its save was committed, and resumed" + ("" if same else " otherwise"))


def _read(of: Try) -> str:
    with WeightReader(root=of.root, name="selftest") as reader:
        return _digest(dict(reader.iter_weights()))


def check_weights(of: Try) -> Result:
    """Publish weights to another process, through memory."""
    state = of.make_state(40)
    with CheckpointCoordinator(of.root) as saves:
        _, staged = saves.upload(40, lambda: state)
        same = _in_process(_read, of) == _digest(state)
    found = "the reader has " + ("the same weights" if same else "other weights")
    return Result(same, found, {"stall_s": staged.stall_s})


def _receive(of: Try, address: str, port: int) -> str:
    if of.device != "cpu":
        torch.accelerator.set_device_index(torch.device(of.device).index)
    group = join_weight_group(address, port, rank=1, world_size=2, timeout_s=ANSWER_S)
    with closing(group), receive_weights(group) as (_, tensors):
        return _digest({name: tensor.clone() for name, tensor in tensors})


def check_broadcast(of: Try, to: Try) -> Result:
    """Broadcast weights from this process to one that has another device."""
    state = of.make_state(50)
    host = WeightGroupHost(address="127.0.0.1")
    with _new_process() as process:
        received = process.submit(_receive, to, host.address, host.port)
        joining = host.join(world_size=2, backend=of.backend, timeout_s=ANSWER_S)
        with closing(joining) as group:
            began = time.perf_counter()
            nbytes = send_weights(state.items(), group, version=50)
            took = time.perf_counter() - began
            same = received.result(ANSWER_S) == _digest(state)
    found = f"{nbytes / took / 1e9:.2f} GB/s" + ("" if same else ", but other weights arrived")
    return Result(same, found, {"seconds": took})


def check_ranks(of: Try) -> Result:
    """Save and load a shard of each rank of ``torchrun``; collective."""
    names = [str(of.root)]
    dist.broadcast_object_list(names)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with CheckpointCoordinator.of_process_group(names[0]) as saves:
        state = of.make_state(rank)
        handle = saves.save(1, {"model": state})
        handle.wait(ANSWER_S)
        loaded = Checkpoints(names[0]).load(1, rank=rank, world_size=ranks)["model"]
    everywhere: list[bool] = [False] * ranks
    dist.all_gather_object(everywhere, _digest(loaded) == _digest(state))
    wrong = [rank for rank, same in enumerate(everywhere) if not same]
    found = f"{ranks} ranks" + (f"; those that loaded something else: {wrong}" if wrong else "")
    return Result(not wrong, found, {"stall_s": handle.stall_s})


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names, dtypes, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(whole.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _measure_copy(source: torch.Tensor) -> float:
    """Return the median seconds of a copy into warm memory of this process."""
    target = torch.empty(source.shape, pin_memory=source.device.type == "cuda", device="cpu")
    return _measure(lambda: target.copy_(source))


def _measure_write(source: torch.Tensor, folder: Path) -> float:
    """Return the median seconds of a write with fsync."""
    content = source.cpu().numpy().data

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        (folder / "raw").unlink()

    return _measure(write)


def _measure(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TURNS + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _in_process(work: Callable[[Try], Any], of: Try) -> Any:
    with _new_process() as process:
        return process.submit(work, of).result(ANSWER_S)


def list_devices() -> list[str]:
    """Return the CPU and the accelerators that PyTorch sees."""
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if accelerator else 0
    return ["cpu", *(f"{accelerator}:{index}" for index in range(count))]


def list_checks(folder: Path, nbytes: int) -> dict[str, Callable[[], Result]]:
    """Return all checks by name; each has a job of its own below ``folder``."""
    devices = list_devices()
    if dist.is_initialized():
        device = devices[1:][int(os.environ["LOCAL_RANK"])] if devices[1:] else "cpu"
        return {"ranks": partial(check_ranks, Try(folder / "ranks", device, nbytes))}
    checks: dict[str, Callable[[], Result]] = {}
    for device in devices:
        for check in (check_save, check_overlap, check_kill, check_weights):
            name = f"{check.__name__.removeprefix('check_')} {device}"
            checks[name] = partial(check, Try(folder / name.replace(" ", "-"), device, nbytes))
    pair = [Try(folder, device, nbytes) for device in (devices[1:] if devices[2:] else ["cpu"] * 2)]
    checks[f"broadcast {pair[0].device} {pair[1].device}"] = partial(check_broadcast, *pair[:2])
    return checks


def run(folder: Path, nbytes: int) -> dict[str, Result]:
    """Run all checks, print each result as soon as it is known, and return them by name."""
    results = {}
    for name, check in list_checks(folder, nbytes).items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = Result(False, f"{type(error).__name__}: {error}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(
                f"{'ok' if results[name].is_ok else 'FAILED':6}  {name:18}  {results[name].found}"
            )
    return results


def main() -> int:
    """Run the checks, write the results down, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trinity_sync.selftest", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="where jobs save")
    parser.add_argument("--mib", type=int, default=256, help="size of the large tensor")
    parser.add_argument("--json", type=Path, default=Path("trinity_sync-selftest.json"))
    given = parser.parse_args()
    if not given.folder.is_dir() or given.mib < 1:
        parser.error(f"{given.folder} is no folder" if given.mib > 0 else "--mib is 1 at least")
    leads = True
    if "RANK" in os.environ:
        if list_devices()[1:]:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        leads = dist.get_rank() == 0
    folder = given.folder.absolute() / f"trinity_sync-selftest-{uuid.uuid4().hex[:8]}"
    try:
        results = run(folder, given.mib << 20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if leads:
        about = {
            "versions": {"trinity_sync": version("trinity-sync"), "torch": torch.__version__},
            "platform": platform.platform(),
            "python": sys.version,
            "devices": [describe(device) for device in list_devices()],
            "arguments": {"folder": str(given.folder), "mib": given.mib},
            "results": {name: asdict(result) for name, result in results.items()},
        }
        given.json.write_text(json.dumps(about, indent=2) + "\n")
        print(f"written to {given.json}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(not all(result.is_ok for result in results.values()))


def describe(device: str) -> str:
    """Return a device with the name of its hardware."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    return f"{device} {name}".strip()


if __name__ == "__main__":
    sys.exit(main())
