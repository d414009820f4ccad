"""Repair the files that crashes left, on disk and in shared memory; safe at any time.

The worker recovers runs and starts savers at every poll (`recovery.node`), and a commit finishes an
interrupted one. This covers files: those of a root without further saves, or of a machine that was
restarted. It repairs what it can prove to be unused or incomplete, and reports why it leaves the
rest.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from trinity_sync.client.prefect_api import UNDER_WAY, FlowRun, PrefectApi
from trinity_sync.errors import TrinitySyncError
from trinity_sync.fs.file_system import is_recent, read_file_system_time
from trinity_sync.orchestration.recovery.flow_runs import look_at_jobs
from trinity_sync.orchestration.root_threads import OTHERS_WAIT_S, RootVisits
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT
from trinity_sync.settings import Settings, read_settings
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.spool import sort_job_spools
from trinity_sync.storage.discovery import iter_committed_steps
from trinity_sync.storage.gc import (
    FILE_REPAIRS,
    Finding,
    remove_attached,
    remove_dead_spool,
    remove_exports,
    remove_temporaries,
)

GRACE_S = 3600.0
"""Minimum age in seconds of a file or slot that is removed as unused."""


async def read_unfinished_saves(api: PrefectApi) -> list[FlowRun]:
    """Read the unfinished runs of saves; those of other flows would be many."""
    name, states = SAVE_DEPLOYMENT.rpartition("/")[2], (*UNDER_WAY, "SCHEDULED")
    return await api.read_pool_runs(read_settings()[1].worker.pool, *states, deployment=name)


def reconcile(
    settings: Settings,
    roots: Sequence[Path],
    runs: Iterable[FlowRun] | None,
    *,
    grace_s: float = GRACE_S,
) -> list[Finding]:
    """Repair what crashes left in jobs and on this node; return what was repaired or left.

    ``runs`` are `read_unfinished_saves`. If they are unknown (None), files that a run may need are
    left, as are files and slots younger than ``grace_s``. The age of a file is by the clock of its
    root's file server.
    """
    jobs, refused = sort_job_spools(settings.spool)
    found = [Finding(str(settings.spool), "images", "left", str(error)) for error in refused]
    sealed = [image for job in jobs for image in job.tickets()[0]]
    images = {image.ticket.image for image in sealed}
    for image in sealed:
        if image.failed:
            why = (
                "its save failed, and a later save evicts it; run: trinity-sync retry "
                f"{image.ticket.root} {image.ticket.step}"
            )
            found.append(Finding(image.ticket.root, f"image of {image.ticket.what}", "left", why))
    busy = None if runs is None else find_busy_steps(runs)
    for request in look_at_jobs(RootVisits("saves"), settings.spool, find_pending_saves):
        if busy is None or request.step not in busy.get(Path(request.root), ()):
            why = "its images wait for a saver; run: trinity-sync status"
            found.append(Finding(request.root, request.run_name, "left", why))

    def repair(root: Path) -> list[Finding]:
        steps = None if busy is None else busy.get(root, set())
        here = {image.ticket.step for image in sealed if Path(image.ticket.root) == root}
        waiting = None if steps is None else steps | here
        return list(_repair_root(settings, root, steps, images, waiting, grace_s))

    for findings in RootVisits("reconcile").visit(roots, repair, each_s=OTHERS_WAIT_S).values():
        found += findings
    for job in jobs:
        try:
            is_fresh = partial(is_recent, now=time.time(), within_s=grace_s)
            found += remove_dead_spool(job, is_fresh=is_fresh)
        except OSError as error:
            found.append(Finding(str(job.folder), "memory", "failed", str(error)))
    return found


def _repair_root(
    settings: Settings,
    root: Path,
    busy: set[int] | None,
    images: set[str],
    waiting: set[int] | None,
    grace_s: float,
) -> Iterator[Finding]:
    try:
        read_identity(root)
    except (OSError, TrinitySyncError) as error:  # of another release, or unreadable
        yield Finding(str(root), "root", "left", str(error))
        return
    for repair in FILE_REPAIRS:
        try:
            yield from repair(root)
        except (OSError, TrinitySyncError) as error:
            yield Finding(str(root), repair.__name__.replace("_", " "), "failed", str(error))
    yield from _repair_catalog(settings, root)
    try:
        if busy is not None:
            yield from _list_missing_exports(root, busy)
        is_fresh = partial(is_recent, now=read_file_system_time(root), within_s=grace_s)
        yield from remove_exports(root, is_fresh=is_fresh)
        yield from remove_temporaries(root, images=images, busy=busy, is_fresh=is_fresh)
        yield from remove_attached(root, waiting=waiting, is_fresh=is_fresh)
    except (OSError, TrinitySyncError) as error:
        yield Finding(str(root), "temporary files", "failed", str(error))


def _list_missing_exports(root: Path, busy: set[int]) -> Iterator[Finding]:
    """Yield the exports that saves requested, and that no flow run of ``busy`` steps makes."""
    for manifest in iter_committed_steps(root):
        for role in [] if manifest.step in busy else manifest.list_missing_exports():
            why = (
                "the requested export failed; retry the flow run of its save, or run: "
                f"trinity-sync export hf {root} {manifest.step} --role {role}"
            )
            yield Finding(str(root), f"export of {role} of step {manifest.step}", "left", why)


def _repair_catalog(settings: Settings, root: Path) -> Iterator[Finding]:
    """Write the rows that a commit or a removal could not write."""
    try:
        from trinity_sync.catalog import get_catalog_url, is_current, open_catalog, rebuild
    except ModuleNotFoundError:  # a client alone has no catalog
        return
    try:
        with open_catalog(get_catalog_url(settings)) as engine:
            with suppress(ValueError):  # of a row that cannot be read
                if is_current(engine, root):
                    return
            rebuild(engine, root)
            yield Finding(str(root), "catalog", "repaired", "it differed from the files")
    except (OSError, TrinitySyncError) as error:
        yield Finding(str(root), "catalog", "failed", str(error))


def find_busy_steps(runs: Iterable[FlowRun]) -> dict[Path, set[int]]:
    """Return the steps that runs save or will save, by root."""
    steps: dict[Path, set[int]] = defaultdict(set)
    for run in runs:
        match run.parameters.get("request"):
            case {"root": str(root), "step": int(step)}:  # a save of any release
                steps[Path(root)].add(step)
    return steps
