"""Images that the ranks offer, each its own, until those of all make a version.

No rank waits for another: each tells the Synchronizer and trains on. What stays incomplete goes
with the next version that is complete, or when a rank has waited for long enough.
"""

from dataclasses import replace

from trinity_sync.errors import WeightSyncError
from trinity_sync.weights.ledger import Ledger
from trinity_sync.weights.version import ImageRef, Version


class Offers:
    """Of one job, whose versions are in ``ledger``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._images: dict[tuple[int, int], dict[int, ImageRef]] = {}
        """(run, step) -> images by rank, where some are absent."""

    async def take(self, part: Version, world_size: int, timeout_s: float) -> Version | None:
        """The whole version, for who offers what was absent last; the others wait.

        Returns:
            None once the version, or a newer one, is in the ledger.

        Raises:
            WeightSyncError: ranks did not offer theirs in time; they are named.
        """
        key = (part.run, part.step)
        images = self._images.setdefault(key, {})
        images.update({ref.rank: ref for ref in part.images})
        if len(images) == world_size:
            self._images = {other: found for other, found in self._images.items() if other > key}
            return replace(part, images=tuple(images[rank] for rank in sorted(images)))
        if not await self._ledger.until(lambda: self._passed(key) or None, timeout_s):
            if self._images.get(key) is images:
                del self._images[key]
            absent = sorted(set(range(world_size)) - set(images))
            raise WeightSyncError(
                f"ranks {absent} did not upload step {part.step} within {timeout_s:g} s; all ranks "
                "have to upload, at the same steps"
            )
        return None

    def _passed(self, key: tuple[int, int]) -> bool:
        newest = self._ledger.book.newest("memory")
        come = newest is not None and (newest.run, newest.step) >= key
        return come or self._ledger.book.abandoned(*key)
