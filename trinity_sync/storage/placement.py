"""Placement of the ranks of a role: their nodes, and the job's spool on each node.

Rank 0 of a role writes it once a run, before it submits a save, as a small file in the root. So a
flow run can be requested on any node without knowledge of the others, and the flow's parameters
are the same at any scale::

    root/.trinity_sync/placements/1.actor.json      run 1, role actor
        {"run_key": "...", "spools": {"/dev/shm/trinity_sync-0/grpo-1a2b3c4d": {"node-0": "0-7"}}}
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from trinity_sync.errors import CommitError, MissingShardsError, TrinitySyncError
from trinity_sync.fs.atomic import (
    lengthen_pauses,
    list_paths,
    make_folder,
    pin_folder,
    read_uncached,
    replace_file,
)
from trinity_sync.fs.records import Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, is_path
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.storage.runs import Run, RunEnd, refuse_other_job

_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class NodeRanks:
    """A node and the ranks of a role on it."""

    node: str
    spool: str
    """Folder of the job in the spool of the node."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NodeShards:
    """A node and the ranks of a save, of all roles, on it."""

    node: str
    spool: str
    ranks: Mapping[str, tuple[int, ...]]
    """Ranks by role."""

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 of any role, which submits small files, is on this node."""
        return any(0 in ranks for ranks in self.ranks.values())

    def __str__(self) -> str:
        return ", ".join(
            f"role {role} {describe_ranks(ranks)}" for role, ranks in self.ranks.items()
        )


@dataclass(frozen=True)
class _Placement(Record):
    """Content of a placement file."""

    run_key: str
    spools: dict[str, dict[str, str]]
    """Ranks by node, by spool."""


def group_by_node(where: Sequence[tuple[str, str]]) -> tuple[NodeRanks, ...]:
    """Return the nodes of ranks, the node of rank 0 first, from the node and spool of each rank."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, place in enumerate(where):
        ranks[place].append(rank)
    return tuple(NodeRanks(*place, tuple(of)) for place, of in ranks.items())


def write_placement(
    root: str | Path, run: int, run_key: str, role: str, places: Sequence[NodeRanks]
) -> None:
    """Write the placement of a role for a run; if it is unchanged, only read it.

    Raises:
        OSError: the root cannot be written.
    """
    path = _path(root, run, role)
    spools: dict[str, dict[str, str]] = defaultdict(dict)
    for place in places:
        spools[place.spool][place.node] = format_ranks(place.ranks)
    text = encode_record(_Placement(run_key, spools))
    with suppress(FileNotFoundError, ValueError):
        if read_uncached(path) == text.encode():
            return
    make_folder(path.parent)
    replace_file(path, text)


def read_placement(root: str | Path, run: int, run_key: str, role: str) -> list[NodeRanks] | None:
    """Return the placement of a role, rank 0's node first; None if the run has not written it.

    Raises:
        CommitError: the file is torn or was altered.
    """
    path = _path(root, run, role)
    try:
        with pin_folder(path.parent):  # a file that is missing would be waited for
            written = decode_record(_Placement, read_uncached(path), path)
        places = [
            NodeRanks(node, spool, parse_ranks(text))
            for spool, nodes in written.spools.items()
            for node, text in nodes.items()
        ]
        if not all(is_path(place.spool) for place in places):
            raise ValueError("the spool is not a path")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CommitError(
            f"the placement of role {role}, {path}, is torn or edited; restart the training, which "
            "writes it again"
        ) from error
    return sorted(places, key=lambda place: place.ranks[0]) if written.run_key == run_key else None


def list_nodes(root: str | Path, run: Run) -> tuple[str, ...]:
    """Return the nodes of a run's ranks, sorted, as far as their placements can be read."""
    every, nodes = _path(root, run.number, "*"), set[str]()
    for path in list_paths(every.parent, every.name):
        with suppress(TrinitySyncError, OSError):
            places = read_placement(root, run.number, run.key, path.name.split(".")[1])
            nodes |= {place.node for place in places or ()}
    return tuple(sorted(nodes))


def await_node_shards(save: SaveId, *, rank_timeout_s: float) -> list[NodeShards]:
    """Return what each node holds of a save; the node of the first role's rank 0 comes first.

    Raises:
        MissingShardsError: a role has not written its placement within ``rank_timeout_s``.
        RootAwayError, SupersededError: as `refuse_other_job`.
        CommitError: as `read_placement`.
        FormatError: the root is of another release.
    """
    deadline = time.monotonic() + rank_timeout_s
    nodes: dict[tuple[str, str], dict[str, tuple[int, ...]]] = defaultdict(dict)
    refuse_other_job(save)
    end = RunEnd(save.root, save.run)
    for role in save.roles:
        pauses = lengthen_pauses()
        while (places := read_placement(save.root, save.run, save.run_key, role)) is None:
            if time.monotonic() >= deadline or end.is_over():
                until = "until its end" if end.is_over() else f"within {rank_timeout_s:g} s"
                raise MissingShardsError(
                    f"role {role} has submitted nothing in run {save.run} of {save.root} {until}: "
                    f"{_path(save.root, save.run, role)} is missing. Check "
                    "that its training runs and that all nodes see this root. Later saves are "
                    "unaffected."
                )
            time.sleep(next(pauses))
            refuse_other_job(save)
        for place in places:
            nodes[place.node, place.spool][role] = place.ranks
    return [NodeShards(*where, ranks) for where, ranks in nodes.items()]


def is_on_several_nodes(save: SaveId) -> bool:
    """Return whether placements name several nodes for a save; raises as `read_placement`."""
    places = (read_placement(save.root, save.run, save.run_key, role) for role in save.roles)
    return len({(each.node, each.spool) for of in places for each in of or ()}) > 1


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in short form: ``0-7,16``."""
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0]):
        of = [rank for _, rank in run]
        parts.append(f"{of[0]}-{of[-1]}" if len(of) > 1 else f"{of[0]}")
    return ",".join(parts)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of `format_ranks`.

    Raises:
        ValueError: it is not such a text, or has more than a million ranks.
    """
    ranks: list[int] = []
    for first, _, last in (part.partition("-") for part in text.split(",")):
        of = range(int(first), int(last or first) + 1)
        if not 0 <= of.start < of.stop <= _MOST_RANKS:
            raise ValueError(f"{text!r} names no ranks")
        ranks += of
    if format_ranks(ranks) != text:
        raise ValueError(f"{text!r} is not the normal form of its ranks")
    return tuple(ranks)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as in a sentence: ``rank 3``, ``ranks 0-7``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _path(root: str | Path, run: int, role: str) -> Path:
    return Path(root) / PRIVATE_FOLDER / "placements" / f"{run}.{role}.json"
