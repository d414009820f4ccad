"""What is known of one version of the weights: where it is, never what it is."""

from dataclasses import dataclass
from typing import Literal

from trinity_sync.errors import WeightSyncError

Source = Literal["memory", "checkpoint", "nccl"]
"""Trinity's ``sync_method``: images in the trainer's spool, a committed step, or a broadcast."""


class Gone(WeightSyncError):
    """The version is not to be had any more: the trainer has gone on, or the step was removed."""


@dataclass(frozen=True)
class ImageRef:
    """One rank's shard of the weights, as a whole ``.pt`` file in a slot of a node's spool."""

    node: str
    """Ray node id (hex) of the node whose shared memory holds it."""
    slot: str
    """Absolute path of the slot there."""
    image: str
    """Random name of the image: what the note beside the slot says as long as the bytes are it."""
    rank: int
    nbytes: int


@dataclass(frozen=True)
class Version:
    """One version of the weights, and where a reader finds it."""

    step: int
    """Trainer's step; the version's number."""
    run: int
    """Run of the job that made it."""
    source: Source
    root: str
    """The job's root."""
    role: str = "actor"
    images: tuple[ImageRef, ...] = ()
    """Of all ranks, by rank, where the source is memory."""

    @property
    def readable(self) -> bool:
        """Whether readers can have it: it was not broadcast, nor given to the Synchronizer."""
        return self.source == "checkpoint" or bool(self.images)

    def name_of(self, image: ImageRef) -> str:
        """What deltas call one rank's image."""
        return f"step {self.step} of run {self.run}, rank {image.rank}, image {image.image}"
