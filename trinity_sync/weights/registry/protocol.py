"""The version registry as a reader uses it: of files, of a Synchronizer, or a user's own."""

from collections.abc import Sequence
from typing import Protocol

from trinity_sync.weights.delta import Array
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.version import ImageCopy, Version


class Registry(Protocol):
    """The version registry, as readers use it."""

    node: str | None
    """Ray node id (hex) of the reader; None if all images are on its node."""

    def latest(self) -> Version | None:
        """Return the newest version that can be read; None if there is none."""

    async def wait_newer(
        self, than: int, timeout_s: float | None, run: int | None, identity: str = ""
    ) -> Version | None:
        """Wait for a newer version that can be read; return None at the time-out.

        ``run`` of the job ``identity`` made step ``than``; None and an empty identity are unknown.
        A version of another job, which is in the root now, is newer. A ``timeout_s`` of None waits
        without limit.
        """

    def set_serving(self, reader: str, step: int, run: int) -> None:
        """Record the version that a reader serves."""

    def fetch_images(
        self, version: Version, ranks: Sequence[int], timeout_s: float
    ) -> Sequence[ImageCopy]:
        """Fetch images that are on other nodes, of the newest version in memory.

        They are in the order of ``ranks``; ``timeout_s`` is for all of them.

        Raises:
            VersionUnavailableError: an image cannot be fetched.
        """

    def fetch_deltas(
        self, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
    ) -> Sequence[Array]:
        """Fetch the delta of each rank's image from ``base``, which the reader has.

        ``version`` is the newest in memory. For each rank, ``spans`` are the byte ranges of its
        image that the reader rounds. ``timeout_s`` is for all deltas.

        Raises:
            VersionUnavailableError: there is no delta between the two versions.
        """
