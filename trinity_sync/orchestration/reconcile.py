"""One call that brings disk, memory and Prefect back together; safe at any time, again and again.

Everything that it does, something else does sooner where all is well: the worker sweeps the spool
and mends runs at every poll, a commit finishes what the one before it left. This is for what falls
between: a worker that was away, a root that nobody saves to any more, a machine that went down. It
mends what it can prove, and says of the rest why it is left.
"""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from trinity_sync.catalog.database import opened, url_of
from trinity_sync.catalog.mirror import differences, note_versions, rebuild
from trinity_sync.client.save_request import SAVE_DEPLOYMENT
from trinity_sync.errors import CatalogError, FormatError, RequestRefusedError, TrinitySyncError
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.process import process_name
from trinity_sync.orchestration.job_registry import known_roots
from trinity_sync.orchestration.orphaned_images import stranded
from trinity_sync.orchestration.prefect_queries import UNDER_WAY, read_pool_runs, request_run
from trinity_sync.orchestration.zombie_runs import mend
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import job_spools
from trinity_sync.storage.export_requests import Wish, wishes
from trinity_sync.storage.gc import (
    FILE_REPAIRS,
    Finding,
    remove_dead_spool,
    remove_exports,
    remove_temporaries,
)
from trinity_sync.storage.manifest import read_manifest

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
"""Seconds for which a file that nobody seems to need is left alone."""


async def reconcile(
    settings: Settings,
    roots: Sequence[Path],
    client: PrefectClient | None,
    *,
    grace_s: float = GRACE_S,
    clock: Callable[[], float] | None = None,
) -> list[Finding]:
    """Mend what was left half done in jobs and on this node, and say what was done.

    Args:
        settings: say where the spool of this node is, and in which pool runs are.
        roots: of the jobs to look into.
        client: of the Prefect server; None if there is none to be had: what a run may still need is
            then left.
        grace_s: seconds for which a file that nobody seems to need is left alone.
        clock: seconds since the epoch; unless given, that of each root's files for them.

    Returns:
        What was mended and what was left, in this order: runs, images, files and catalog, memory.
        Not what is as it should be.
    """
    found: list[Finding] = []
    runs: list[FlowRun] | None = None
    if client:
        try:
            found += await _mend_runs(client, settings)
            found += await _ask_for_runs(client, settings, clock or time.time)
            runs = await _saves_to_come(client, settings)
        except httpx.HTTPError as error:  # such as a login that it does not take
            found.append(Finding("Prefect", "runs", "left", f"the server cannot be asked: {error}"))
    found += await asyncio.to_thread(
        lambda: list(_mend_files(settings, roots, runs, grace_s, clock))
    )
    return found


def mend_known_roots(settings: Settings) -> list[Finding]:
    """The quick part, without a server: iteration files, and steps that lost their names."""
    found = [finding for root in known_roots(settings) for finding in _files_of(root)]
    for finding in found:
        logger.warning("%s: %s %s: %s", finding.where, finding.state, finding.what, finding.why)
    return found


async def _mend_runs(client: PrefectClient, settings: Settings) -> list[Finding]:
    """Runs that Prefect shows as under way although their process on this node is dead."""
    here = f"{settings.node}/{process_name(os.getpid())}"
    found = []
    for run in await read_pool_runs(client, settings.work_pool, *UNDER_WAY):
        try:
            await mend(client, run, here, spool=settings.spool)
            now = (await client.read_flow_run(run.id)).state
        except (ObjectNotFound, httpx.HTTPStatusError) as error:
            found.append(Finding("Prefect", f"run {run.name}", "left", str(error)))
            continue
        if now and run.state and now.type not in UNDER_WAY:
            why = "its process is gone; it is begun again" if now.is_scheduled() else now.name
            found.append(Finding("Prefect", f"run {run.name}", "mended", str(why)))
    return found


async def _ask_for_runs(
    client: PrefectClient, settings: Settings, clock: Callable[[], float]
) -> list[Finding]:
    """Images that were handed over, and that nobody asked a flow run for."""
    requests = await asyncio.to_thread(stranded, settings.spool, clock=clock)
    if not requests:
        return []
    try:
        deployment = await client.read_deployment_by_name(SAVE_DEPLOYMENT)
    except ObjectNotFound:
        why = f"{SAVE_DEPLOYMENT} is not deployed; run: trinity-sync deploy"
        return [Finding(each.root, each.run_name, "left", why) for each in requests]
    found = []
    for request in requests:
        try:
            run = await request_run(client, deployment.id, request.flow_run)
        except (RequestRefusedError, httpx.HTTPStatusError) as error:
            found.append(Finding(request.root, request.run_name, "left", str(error)))
            continue
        if run.state is None or run.state.is_scheduled():
            why = "its images wait in the spool; a run is asked for"
            found.append(Finding(request.root, request.run_name, "mended", why))
        elif run.state.is_final():
            why = f"its images wait, and its run is {run.state.name}: retry it in the Prefect UI"
            found.append(Finding(request.root, request.run_name, "left", why))
    return found


async def _saves_to_come(client: PrefectClient, settings: Settings) -> list[FlowRun]:
    """The saves that a run is at or will be; schedules have runs of other flows for weeks ahead."""
    name = SAVE_DEPLOYMENT.rpartition("/")[2]
    states = (*UNDER_WAY, StateType.SCHEDULED)
    return await read_pool_runs(client, settings.work_pool, *states, deployment=name)


def _mend_files(
    settings: Settings,
    roots: Sequence[Path],
    runs: Iterable[FlowRun] | None,
    grace_s: float,
    clock: Callable[[], float] | None,
) -> Iterator[Finding]:
    jobs = list(job_spools(settings.spool))
    found = [(job, *job.tickets()) for job in jobs]
    sealed = [image for _, good, _ in found for image in good]
    for job, _, bad in found:
        for error in bad:
            if isinstance(error, FormatError):
                yield Finding(str(job.folder), "an image", "left", str(error))
    images = {image.ticket.image for image in sealed}
    for image in sealed:
        if image.failed:
            why = "its save failed; retry its run in the Prefect UI, or a later save takes its room"
            yield Finding(image.ticket.root, f"image of {image.ticket.what}", "left", why)
    busy = None if runs is None else _steps_of(runs)
    for root in roots:
        yield from _files_of(root)
        yield from _catalog_of(settings, root)
        steps = None if busy is None else busy[root]
        for wish in wishes(root):
            if steps is not None and wish.step not in steps:
                what = f"export of {wish.role} of step {wish.step}"
                yield Finding(str(root), what, *_state_of(root, wish))
        try:
            before = (clock() if clock else file_time(root)) - grace_s
            yield from remove_exports(root, before=before)
            yield from remove_temporaries(root, images=images, busy=steps, before=before)
        except OSError as error:
            yield Finding(str(root), "temporary files", "left", str(error))
    for job in jobs:
        try:
            yield from remove_dead_spool(job, before=(clock or time.time)() - grace_s)
        except OSError as error:
            yield Finding(str(job.folder), "memory", "left", str(error))


def _state_of(root: Path, wish: Wish) -> tuple[Literal["mended", "left"], str]:
    """What becomes of a wish that no run is at."""
    try:
        manifest = read_manifest(root, wish.step)
    except TrinitySyncError as error:
        return "left", str(error)
    if manifest is None or manifest.run != wish.run:
        return "left", "the step is not committed, or was replaced; its next save renews it"
    how = f"retry its save's run, or run: trinity-sync export {root} {wish.step} --role {wish.role}"
    return "left", f"the trainer asked for it, and it did not succeed; {how}"


def _files_of(root: Path) -> Iterator[Finding]:
    for repair in FILE_REPAIRS:
        try:
            yield from repair(root)
        except (OSError, TrinitySyncError) as error:
            yield Finding(str(root), repair.__name__.replace("_", " "), "left", str(error))


def _catalog_of(settings: Settings, root: Path) -> Iterator[Finding]:
    """Rows that a commit or a removal could not write while the catalog was away."""
    try:
        with opened(url_of(settings)) as engine:
            note_versions(engine, root)
            try:
                missed = differences(engine, root, claims=False)
            except CatalogError:
                missed = ["has a row that cannot be read"]
            if missed:
                rebuild(engine, root)
                differences(engine, root, claims=False)  # raises what was not mended
                yield Finding(str(root), "catalog", "mended", f"it {'; '.join(missed)}")
    except (OSError, TrinitySyncError) as error:
        yield Finding(str(root), "catalog", "left", str(error))


def _steps_of(runs: Iterable[FlowRun]) -> dict[Path, set[int]]:
    """Steps that a run is at or will be, by root."""
    steps: dict[Path, set[int]] = defaultdict(set)
    for run in runs:
        match run.parameters.get("request"):
            case {"root": str(root), "step": int(step)}:  # a save, of whatever release
                steps[Path(root)].add(step)
    return steps
