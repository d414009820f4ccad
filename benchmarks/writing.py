"""What a flow's tasks do, for a process beside the ranks; like those tasks, it imports no torch."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trinity_sync.snapshot.identity import SaveId
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.commit import commit, free_committed_slots
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards


def write_out(share: NodeShards, save: SaveId, components: tuple[str, ...]) -> None:
    """Write the components in parallel, then commit."""
    write = partial(persist, share, save, options=WriteOptions())
    with ThreadPoolExecutor(len(components)) as tasks:
        written = [file for files in tasks.map(write, components) for file in files]
    commit(save, written)
    free_committed_slots(JobSpool(Path(share.spool)), save, written)
