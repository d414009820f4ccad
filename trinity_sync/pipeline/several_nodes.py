"""A save of several nodes without a stack: what the savers of its nodes tell each other.

They share the root alone. The saver of each node persists what its ranks have sealed, and leaves a
record of it among the temporary files of the step. The saver of the first node, that of rank 0,
commits once all records are there, and removes them. The others wait for its commit, and free their
slots::

    root/global_step_40/.node1.5d41402abc4b2a76b9719d911017c592.tmp

The number is that of the node in `await_node_shards`, the rest a digest of the request's key. A
record without files says that a saver has begun. Records that a crash leaves are removed like the
temporary files that they name.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import MissingShardsError, SaveError, SaveFailedError
from trinity_sync.fs.atomic import (
    TEMPORARY_SUFFIX,
    lengthen_pauses,
    list_uncached,
    make_folder,
    read_uncached,
    replace_file,
)
from trinity_sync.fs.records import Record, encode_record, read_record
from trinity_sync.layout import is_below
from trinity_sync.saves.journal import Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import FAILURES, SUCCESSES, read_status
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.runs import refuse_superseded
from trinity_sync.storage.save_functions import FunctionStatus
from trinity_sync.storage.uncommitted import Persisted, Written, is_being_written, remove_files


@dataclass(frozen=True)
class NodeRecord(Record):
    """What the saver of a node has persisted of a save, or why it has not."""

    ended: bool = False
    written: tuple[Written, ...] = ()
    statuses: tuple[FunctionStatus, ...] = ()
    error: str = ""


def find_node(request: SaveRequest, nodes: Sequence[NodeShards], spool: Path, name: str) -> int:
    """Return which of the nodes of a save this node is, by the job's spool and the node's name.

    Raises:
        SaveError: it is none of them.
    """
    if len(nodes) == 1:
        return 0
    mine = [each for each in nodes if each.spool == str(spool)]
    for each in mine if len(mine) == 1 else [each for each in mine if each.node == name]:
        return nodes.index(each)
    raise SaveError(
        f"{request.run_name} of {request.root} is not committed: the saver of node {name} with the "
        f"spool {spool} is none of its nodes {[each.node for each in nodes]}. Set "
        "TRINITY_SYNC_NODE to one name in all processes of the node"
    )


def write_node_record(request: SaveRequest, number: int, record: NodeRecord) -> None:
    """Leave the record of a node, in the place of an earlier one."""
    make_folder(request.save.folder)
    replace_file(_path(request, number), encode_record(record))


def has_node_records(request: SaveRequest) -> bool:
    """Return whether a saver of any node has begun a save."""
    return bool(list_uncached(request.save.folder, _path(request, "*").name))


def remove_node_records(request: SaveRequest, number: int | None = None) -> None:
    """Remove the record of a node, or of all nodes, and what a killed saver has left of it."""
    name = _path(request, "*" if number is None else number).name
    for pattern in (name, f".{name}.*"):
        remove_files(list_uncached(request.save.folder, pattern))


def await_node_records(
    request: SaveRequest, nodes: Sequence[NodeShards], *, rank_timeout_s: float
) -> list[Persisted]:
    """Wait for what the other nodes persist, as long as any of them writes.

    Raises:
        MissingShardsError: a node has left no record, and none has written anything within
            ``rank_timeout_s``.
        SaveError: a node could not persist its images, or its record was altered.
        SupersededError: a later run has superseded the step.
    """
    waiting = {number: node for number, node in enumerate(nodes) if number}
    found: list[Persisted] = []
    quiet = Quiet(request, rank_timeout_s)
    while True:
        for number in list(waiting):
            path = _path(request, number)
            record = read_record(NodeRecord, path, read_uncached)
            for each in record.written if record else ():  # anyone may write a record
                final = request.save.folder / each.record.path
                is_next = Path(each.temporary or final).parent == final.parent
                if not is_below(each.record.path) or not is_next:
                    raise SaveError(f"{path} was altered, and names files elsewhere; remove it")
            if record and record.error:
                raise SaveError(f"node {waiting[number].node}: {record.error}")
            if record and record.ended:
                del waiting[number]
                found.append(Persisted(record.written, record.statuses))
        if not waiting:
            return found
        # no node will commit it: its images hold slots meanwhile
        refuse_superseded(request.root, request.run, "", request.step)
        if quiet.pause():
            lacking = "; ".join(f"node {each.node}, {each}" for each in waiting.values())
            raise MissingShardsError(
                f"{request.run_name} of {request.root} is not committed: nothing was persisted "
                f"within {rank_timeout_s:g} s by {lacking}. Check whether the node runs and sees "
                "this root, and saver.log in its home. Later saves are unaffected."
            )


def await_commit(
    request: SaveRequest, nodes: Sequence[NodeShards], *, rank_timeout_s: float
) -> None:
    """Wait until the saver of the first node has committed a save.

    Raises:
        SaveFailedError: it has failed.
        SaveError: it has written nothing for twice ``rank_timeout_s``.
        SupersededError: a later run has superseded the step.
    """
    journal = Journal.of(request)
    quiet = Quiet(request, 2 * rank_timeout_s)
    while True:
        with suppress(OSError):
            journal.read()
        status, why = read_status(request, journal.find(request.key))
        if status in SUCCESSES:
            return
        if status in FAILURES:
            raise SaveFailedError(why)
        # no node will commit it: its images hold slots meanwhile
        refuse_superseded(request.root, request.run, "", request.step)
        if quiet.pause():
            raise SaveError(
                f"{request.run_name} of {request.root} is not committed by node {nodes[0].node}, "
                f"{nodes[0]}: nothing was written within {2 * rank_timeout_s:g} s. Check whether "
                "the node runs and sees this root, and saver.log in its home. Later saves are "
                "unaffected."
            )


class Quiet:
    """Tells whether a step has not been written for some seconds."""

    def __init__(self, request: SaveRequest, seconds: float) -> None:
        self._request = request
        self._seconds = seconds
        self._ask_at = time.monotonic() + seconds
        self._pauses = lengthen_pauses()

    def pause(self) -> bool:
        """Return whether nothing was written; otherwise sleep a little."""
        if time.monotonic() >= self._ask_at:
            root, step = self._request.root, self._request.step
            if not is_being_written(root, step, within_s=self._seconds):
                return True
            self._ask_at = time.monotonic() + min(1.0, self._seconds)
        time.sleep(next(self._pauses))
        return False


def _path(request: SaveRequest, number: int | str) -> Path:
    return request.save.folder / f".node{number}.{request.key_digest}{TEMPORARY_SUFFIX}"
