"""What goes through Ray's object store: images for readers on other nodes, and deltas for all.

A task on the node of an image takes it from its slot, or compares it with the one that a reader
has, if that lies in another slot still. Ray brings what it made to another node once, and all
readers there map it. The Synchronizer makes the references, when the first reader asks, and keeps
them until there is a newer version; the bytes never enter its process.

It does not need torch, and so spares the task's process the seconds of its import. Deltas between
images of one node are made without Ray, too.
"""

import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trinity_sync.snapshot.slot_lock import lock_slot
from trinity_sync.snapshot.version_tag import VersionTag, read_version_tag
from trinity_sync.storage.persist import yield_to_others
from trinity_sync.weights.delta import Array, encode
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.version import Gone, ImageRef, Version

THREADS = 4
"""That compare two images; as many as write one."""

Copy = tuple[VersionTag, Any]
"""What an image's note says, and its bytes: an array of ``uint8`` that nobody may write to."""


class Copies:
    """References to the copies and deltas of one version, made as they are asked for."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._made: dict[int, list[Any]] = {}
        self._deltas: dict[tuple[str, Spans], list[Any]] = {}

    def of(self, version: Version, ranks: Sequence[int]) -> list[list[Any]]:
        """For each rank, the references of a `Copy`; the same ones whoever asks."""
        self.keep_only(version)
        images = {ref.rank: ref for ref in version.images}
        for rank in ranks:
            if rank not in self._made:
                self._made[rank] = _begin(_copy, images[rank], images[rank], returns=2)
        return [self._made[rank] for rank in ranks]

    def deltas(self, base: Version, version: Version, spans: Sequence[Spans]) -> list[list[Any]]:
        """For each rank, the reference of what turns its image of ``base`` into the version's.

        Args:
            base: what a reader has.
            version: the newest.
            spans: for each rank, what of its image the reader has rounded.

        Raises:
            Gone: their images are on other nodes, or of more or fewer ranks.
        """
        self.keep_only(version)
        if [ref.node for ref in base.images] != [ref.node for ref in version.images]:
            raise Gone(f"version {version.step} has other nodes or ranks than {base.step}")
        wanted = [(old.image, each) for old, each in zip(base.images, spans, strict=True)]
        for new, which in zip(version.images, wanted, strict=True):
            if which not in self._deltas:
                made = _begin(_delta, new, base, version, new.rank, which[1], returns=1)
                self._deltas[which] = [made]
        return [self._deltas[which] for which in wanted]

    def keep_only(self, version: Version | None) -> None:
        """Let go of what is of other versions; who reads it keeps it as long as it does."""
        if version != self._version:
            self._version, self._made, self._deltas = version, {}, {}


def fetch(
    synchronizer: Any, version: Version, ranks: Sequence[int], timeout_s: float
) -> list[Copy]:
    """The images of these ranks, in the object store of this node.

    Raises:
        Gone: an image is overwritten, its node is dead, the version is not the newest in memory
            any more, or the time is over.
    """
    asked = synchronizer.copies.remote(version.run, version.step, list(ranks))
    found = _got(asked, f"copy of version {version.step} from its node", timeout_s)
    return list(zip(found[::2], found[1::2], strict=True))


def fetch_deltas(
    synchronizer: Any, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
) -> list[Array]:
    """For each rank, what turns its image of ``base`` into the version's; see `delta_between`.

    Raises:
        Gone: as `fetch`, of either version.
    """
    asked = synchronizer.deltas.remote(base, version.run, version.step, spans)
    return _got(asked, f"delta from version {base.step} to {version.step}", timeout_s)


def delta_between(
    base: Version, version: Version, rank: int, spans: Spans = (), *, nice: int = 0
) -> Array:
    """What turns a rank's image of ``base`` into that of ``version``, both in slots of this node.

    No lock is taken: a trainer that wants a slot finds it free, and needs no other one because of
    this. The note beside a slot goes before its bytes do, so notes that are there after all has
    been read say that it was of these images.

    Args:
        base: what a reader has.
        version: what it shall have, of as many ranks.
        rank: whose images.
        spans: what of them is compared, and sent, rounded; see ``rounding``.
        nice: by how much the comparing threads yield to others, as in nice(1).

    Raises:
        Gone: one of them is overwritten or removed, or they are of different structure.
    """
    old, new = base.images[rank], version.images[rank]

    def require_both() -> None:
        if _note(old).layout != _note(new).layout:
            raise Gone(f"versions {base.step} and {version.step} are of different structure")

    def each(*arguments: Any) -> Iterator[Any]:
        for found in pool.map(*arguments):
            require_both()  # or nothing more is compared in vain
            yield found

    require_both()
    try:
        before, after = _mapped(old), _mapped(new)
    except (FileNotFoundError, ValueError) as error:
        raise Gone(f"an image was removed with its trainer: {error}") from error
    names = names_of(base, version, rank, spans)
    with ThreadPoolExecutor(THREADS, "delta", partial(yield_to_others, nice)) as pool:
        delta = encode(before, after, **names, spans=spans, each=each)
    require_both()
    return delta


def names_of(base: Version, version: Version, rank: int, spans: Spans) -> dict[str, str]:
    """What a delta calls the images that it leads from and to."""
    rounds = ", rounded" if spans else ""
    return {
        "base": base.name_of(base.images[rank]) + rounds,
        "version": version.name_of(version.images[rank]) + rounds,
    }


def _got(asked: Any, what: str, timeout_s: float) -> list[Any]:
    """What the references stand for that the Synchronizer was asked for."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    deadline = time.monotonic() + timeout_s
    try:
        references = ray.get(asked, timeout=timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        found: list[Any] = ray.get([each for of in references for each in of], timeout=left_s)
    except RayError as error:
        reason = error.cause if isinstance(error, RayTaskError) else error
        said = str(reason).strip().partition("\n")[0]
        raise Gone(f"no {what}: {said}") from error
    return found


def _begin(task: Any, where: ImageRef, *arguments: Any, returns: int) -> Any:
    """Have a task run on the node of an image."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(where.node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return _remote(task).options(**options, num_returns=returns).remote(*arguments)


@cache
def _remote(task: Any) -> Any:
    import ray

    return ray.remote(task)


def _copy(ref: ImageRef) -> Iterator[Any]:
    """A generator, so that Ray has put the bytes into its store before the lock is given back."""
    try:
        with lock_slot(Path(ref.slot)) as content:
            yield _note(ref)
            yield np.frombuffer(content, np.uint8, ref.nbytes)
    except FileNotFoundError as error:
        raise Gone(f"the image in {ref.slot} was removed with its trainer") from error


def _delta(base: Version, version: Version, rank: int, spans: Spans) -> Array:
    from trinity_sync.settings import Settings

    return delta_between(base, version, rank, spans, nice=Settings().nice)


def _note(ref: ImageRef) -> VersionTag:
    said = read_version_tag(Path(ref.slot))
    if said is None or said.image != ref.image:
        raise Gone(f"the image in {ref.slot} was overwritten")
    return said


def _mapped(ref: ImageRef) -> Array:
    with Path(ref.slot).open("rb") as file:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(file.fileno(), ref.nbytes, flags, mmap.PROT_READ), np.uint8)
