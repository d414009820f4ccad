"""One campaign: a fault, recovery, a look at everything, and again.

It ends when the time is over and each kind has occurred.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import httpx
from prefect.client.schemas.objects import FlowRun

from tests.integration.prefect_api import Api
from tests.models.chaos.faults import FAULTS, NEEDS
from tests.models.chaos.invariants import Commit, Fates, History, fates, violations
from tests.models.chaos.report import Report
from tests.models.chaos.training import RANKS
from tests.models.chaos.world import Hang, World
from trinity_sync.errors import TrinitySyncError
from trinity_sync.storage.save_timing import read_saves

AT_THE_END_S = 60.0
"""Kept for the last saves to come to rest."""
RECONCILED_EVERY = 8
"""Faults, after which the flow runs that is scheduled by the hour: what died has left files."""


def campaign(report: Report, kinds: Sequence[str] = (), *, on_postgres: bool = False) -> None:
    """Run what a report is for, and fill it in.

    Args:
        report: says seed, minutes and driver, one of `world.DRIVERS`.
        kinds: all faults by default; they come in an order by chance, each as often.
        on_postgres: have Prefect's database there, if it is installed.
    """
    random, minutes, history = Random(report.seed), report.minutes, History()
    with World.running(report.driver, on_postgres=on_postgres) as world:
        here = {"", *world.possible}
        possible = sorted(kind for kind in kinds or FAULTS if NEEDS[kind] in here)
        report.skipped = sorted(set(kinds or FAULTS) - set(possible))
        waiting: list[str] = []
        began = time.monotonic()
        try:
            world.await_commit(0.0)
            end = began + 60 * minutes - AT_THE_END_S
            while time.monotonic() < end or len(report.recoveries) < len(possible):
                waiting = waiting or random.sample(possible, len(possible))
                kind = waiting.pop()
                since = time.monotonic() - began
                print(f"{since:4.0f} s  {kind}", end="", flush=True)
                FAULTS[kind](world, random)
                over = time.monotonic()
                world.repair()
                seconds = world.await_commit(over) - over
                report.recoveries[kind].append(seconds)
                print(f": a commit {seconds:.1f} s later", flush=True)
                found = list(violations(world, history))
                report.problems += [f"after {kind}: {each}" for each in found]
                if sum(map(len, report.recoveries.values())) % RECONCILED_EVERY == 0:
                    report.problems += _reconcile(world, grace_s=60.0)
            world.end_training()
            report.problems += violations(world, history)
            report.fates = _at_rest(world, history)
            report.problems += [f"lost: {each}" for each in report.fates.lost]
            report.problems += _reconcile(world, grace_s=0.0)
            report.problems += _left_over(world)
        except Hang as hang:
            report.problems.append(f"HANG: {hang}")
        except TrinitySyncError as error:
            report.problems.append(f"the stack could not be repaired: {error}\n{world.where()}")
        finally:
            report.problems += world.fell
            report.starts, report.commits = world.starts, len(history.committed)
            report.by_saver = sum(each.timing.by_saver for each in read_saves(world.root))
            report.versions_read = sum(n["what"] == "read" for n in world.notes("explorer"))
            report.minutes = (time.monotonic() - began) / 60


def _at_rest(world: World, history: History) -> Fates:
    """What became of all saves; those of an earlier start may still be in flight."""
    submitted, deadline = _submitted(world), time.monotonic() + AT_THE_END_S
    while True:
        history.committed |= world.commits().keys()
        found = fates(world, history, submitted)
        if not found.lost or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def _submitted(world: World) -> set[Commit]:
    """Run and step of the saves of which every rank had submitted its part."""
    by_rank = [
        {
            (note["run"], note["step"])
            for name in (f"rank{rank}", f"rank{rank}-second")
            for note in world.notes(name)
            if note["what"] == "submitted"
        }
        for rank in range(RANKS)
    ]
    return set.intersection(*by_rank)


def _reconcile(world: World, grace_s: float) -> list[str]:
    """Repair what killed processes left, as the schedule does, or a user without a stack."""
    if not world.has_stack:
        command = [sys.executable, "-m", "trinity_sync", "reconcile", str(world.root)]
        done = subprocess.run(
            [*command, "--grace", str(grace_s)], env=world.environment, capture_output=True
        )
        said = f"{done.stdout.decode()} {done.stderr.decode()}"
        return [] if done.returncode == 0 else [f"reconcile: {done.returncode}, {said}"]
    run = world.started({"root": str(world.root), "grace_s": grace_s}, "reconcile/reconcile")

    def final() -> FlowRun | None:
        with suppress(httpx.HTTPError):
            return Api().final(run)
        return None

    ended = world.until(final, "the end of reconcile", pause=1.0)
    completed = ended.state is not None and ended.state.is_completed()
    return [] if completed else [f"reconcile ended as {ended.state}"]


def _left_over(world: World) -> list[str]:
    """What lies about although everything has ended and was reconciled."""
    found = [str(path) for path in world.root.glob("global_step_*/actor/.*.tmp")]
    committed = {step for _, step in world.commits()}
    return [
        f"left in a committed step: {path}"
        for path in found
        if int(path.partition("global_step_")[2].partition("/")[0]) in committed
    ]
