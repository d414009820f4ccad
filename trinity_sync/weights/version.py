"""Versions of the weights: which step and run made them, and where a reader finds them."""

from dataclasses import dataclass
from typing import Any, Literal

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.version_tag import VersionTag

Source = Literal["memory", "checkpoint", "nccl"]
"""Trinity's ``sync_method``: images in the trainer's spool, a committed step, or a broadcast."""

ImageCopy = tuple[VersionTag, Any]
"""Version tag and bytes of an image, a read-only ``uint8`` array of shape ``[nbytes]``."""


class VersionUnavailableError(WeightSyncError):
    """A version that cannot be read any longer: an image was overwritten, or the step removed."""


@dataclass(frozen=True)
class ImageRef:
    """Location of one rank's shard of the weights: a ``.pt`` file in a slot of a node's spool."""

    node: str
    """Ray node id (hex) of the node whose shared memory holds it."""
    slot: str
    """Absolute path of the slot there."""
    image: str
    """Random name of the image; the slot's version tag has it while the bytes are unchanged."""
    rank: int
    nbytes: int


@dataclass(frozen=True)
class Version:
    """One version of the weights, and where a reader finds it."""

    step: int
    """The trainer's step."""
    run: int
    """Number of the run that made it."""
    source: Source
    root: str
    role: str = "actor"
    images: tuple[ImageRef, ...] = ()
    """The images of all ranks, by rank, if the source is memory."""
    identity: str = ""
    """Identity of the job, see `snapshot.job_identity`; empty if it is unknown."""

    @property
    def readable(self) -> bool:
        """Whether a reader can open it: not a broadcast, nor a dict given to the Synchronizer."""
        return self.source == "checkpoint" or bool(self.images)

    def is_of_other_job(self, other: "Version") -> bool:
        """Return whether the root was recreated between two versions, so that steps say nothing."""
        return "" not in (self.identity, other.identity) and self.identity != other.identity

    def is_older_than(self, other: "Version") -> bool:
        """Return whether another version of the same job is newer."""
        is_less = (self.run, self.step) < (other.run, other.step)
        return is_less and not self.is_of_other_job(other)

    def name_image(self, image: ImageRef) -> str:
        """Return the name by which deltas refer to one rank's image."""
        return f"step {self.step} of run {self.run}, rank {image.rank}, image {image.image}"
