"""What a flow's tasks do, for a process beside the ranks; like those tasks, it imports no torch."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.commit import commit
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Save


def write_out(share: NodeShards, save: Save, components: tuple[str, ...]) -> None:
    """Write the components in parallel, then commit."""
    write = partial(persist, share, save, options=WriteOptions())
    with ThreadPoolExecutor(len(components)) as tasks:
        written = [file for files in tasks.map(write, components) for file in files]
    commit(save, written)
    free_committed_slots(JobSpool(Path(share.spool)), save, written)
