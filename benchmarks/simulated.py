"""Simulated ranks and nodes: their images wait in real spools, sealed by real tickets."""

import io
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from trinity_sync.layout import Component

COMPONENTS: tuple[Component, ...] = ("model", "optim", "extra_state")


class Job:
    """A job of simulated ranks, spread evenly over simulated nodes."""

    def __init__(self, root: Path, memory: Path, ranks: int, nodes: int) -> None:
        from trinity_sync.snapshot.spool import open_job_spool
        from trinity_sync.storage.placement import NodeRanks, write_placement
        from trinity_sync.storage.runs import open_run

        root.mkdir(exist_ok=True)
        self.root, self.ranks, self.nodes = root, ranks, nodes
        self._run = open_run(root, "scale", 0)
        spools = [open_job_spool(memory / f"node{number}", root) for number in range(nodes)]
        each = ranks // nodes
        self._spools = {f"node{number}": spool for number, spool in enumerate(spools)}
        self.ranks_of = {
            name: tuple(range(number * each, (number + 1) * each))
            for number, name in enumerate(self._spools)
        }
        places = [
            NodeRanks(name, str(spool.folder), self.ranks_of[name])
            for name, spool in self._spools.items()
        ]
        write_placement(root, self._run.number, self._run.key, "actor", places)

    def stage(self, step: int) -> Any:
        """Seal images of all ranks, in slots of just their size: a `Stager` takes 2 MiB each."""
        from trinity_sync.layout import shard_file
        from trinity_sync.saves.save_request import SaveRequest
        from trinity_sync.snapshot.packed import pack
        from trinity_sync.snapshot.ticket import Ticket, seal

        image = make_image()
        small = b"".join(content for _, content in pack({"config.json": b"{}"}).extents)
        for name, ranks in self.ranks_of.items():
            for rank in ranks:
                components = (*COMPONENTS, *(["metadata"] if rank == 0 else []))
                for component in components:
                    folder = component == "metadata"
                    content = small if folder else image
                    slot = self._spools[name].slot("actor", component, rank, 0)
                    slot.write_bytes(content)
                    ticket = Ticket(
                        image=uuid.uuid4().hex,
                        root=str(self.root),
                        run=self._run.number,
                        run_key=self._run.key,
                        step=step,
                        kind="checkpoint",
                        role="actor",
                        component=component,
                        rank=rank,
                        world_size=self.ranks,
                        components=components,
                        roles=("actor",),
                        path="actor"
                        if folder
                        else f"actor/{shard_file(component, self.ranks, rank)}",
                        form="folder" if folder else "file",
                        nbytes=len(content),
                        sealed_at=time.time(),
                        monotonic_s=time.monotonic(),
                        stall_s=0.0,
                    )
                    seal(slot, ticket)
        return SaveRequest(
            root=str(self.root),
            step=step,
            run=self._run.number,
            run_key=self._run.key,
            components=(*COMPONENTS, "metadata"),
        )

    def close(self) -> None:
        """Remove the slots."""
        for spool in self._spools.values():
            shutil.rmtree(spool.folder)


def make_image() -> bytes:
    """Return a ``.pt`` file of a tensor of 64 bytes."""
    import torch

    file = io.BytesIO()
    torch.save({"w": torch.zeros(16)}, file)
    return file.getvalue()
