"""Versions of weights without Ray: published by real stagers, with a file as the registry."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tests.support.job import Job
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.weights.versions import ImageRef, Version

NUMEL = 300_000

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class VersionFile:
    """Stands in for the Synchronizer, for any number of processes.

    To a reader on another ``node``, images come as copies.
    """

    path: Path
    node: str | None = None

    def tell(self, version: Version) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(version)))
        temporary.replace(self.path)

    def latest(self) -> Version | None:
        if not self.path.exists():
            return None
        body = json.loads(self.path.read_text())
        body["images"] = tuple(ImageRef(**ref) for ref in body["images"])
        return Version(**body)

    async def wait_newer(self, than: int | Version, timeout_s: float | None) -> Version | None:
        deadline = time.monotonic() + (timeout_s or 60)
        while time.monotonic() < deadline:
            found = self.latest()
            is_newer = found and (
                than.is_older_than(found) if isinstance(than, Version) else found.step > than
            )
            if is_newer:
                return found
            await asyncio.sleep(0.001)
        return None

    def set_serving(self, reader: str, step: int, run: int) -> None:
        pass

    def fetch_images(self, version: Version, ranks: Sequence[int], timeout_s: float) -> list[Any]:
        from trinity_sync.weights.actor_registry import copy_image  # imports Ray

        found = []
        for rank in ranks:
            with closing(copy_image(version.images[rank])) as parts:  # holds the lock
                found.append([next(parts), next(parts).copy()])
        return found


def upload(job: Job, step: int, *states: Any, run: int = 1, node: str = "here") -> Version:
    """Stage a state a rank, without saving it, and give the version."""
    for rank, state in enumerate(states):
        stager, origin = job.stager(rank), job.origin(step, rank=rank, run=run)
        if stager.publish(origin, "model") is None:
            stager.stage(origin, {"model": state}, seals=False)
            assert stager.publish(origin, "model")
    version = version_in(job.spool, job.root, run, step, node)
    assert len(version.images) == len(states)
    return version


def version_in(spool: JobSpool, root: Path, run: int, step: int, node: str = "here") -> Version:
    """Return the version of a step with its images in a spool."""
    found = [
        each for each in spool.list_versions("actor") if (each[1].run, each[1].step) == (run, step)
    ]
    images = [
        ImageRef(node, str(slot), tag.image, tag.rank, tag.nbytes)
        for slot, tag in sorted(found, key=lambda each: each[1].rank)
    ]
    return Version(step, run, "memory", str(root), "actor", tuple(images))


def first(rank: int = 0) -> State:
    """Weights of a rank, two of which are tied."""
    random = torch.Generator().manual_seed(rank)
    weight = torch.randn(NUMEL, generator=random).bfloat16()
    return {f"{rank}.w": weight, f"{rank}.tied": weight, f"{rank}.b": torch.zeros(7)}


def train(state: State, step: int) -> None:
    """Change one element in a hundred, in place."""
    rank = next(iter(state))[0]
    at = np.random.default_rng(step).choice(NUMEL, NUMEL // 100, replace=False)
    state[f"{rank}.w"].view(torch.int16)[torch.from_numpy(at)] ^= 1
    state[f"{rank}.b"] += step


def digest(*states: State) -> str:
    found = xxhash.xxh3_128()
    for state in states:
        for name in sorted(state):
            found.update(name.encode() + state[name].view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
