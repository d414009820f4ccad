"""Prometheus metrics of a flow worker, of its node, and of the jobs that it knows.

They are served if ``worker.metrics`` is set. Each worker counts its own saves, so sum over workers.
The newest step of each known job is also read from its root, for saves of other workers. Without a
worker, a command writes the gauges of node and jobs to a file (`write_gauges`).

The spool is in memory and is read at each scrape. Roots are on file systems that may hang: threads
read them every `OBSERVE_S` seconds, and a scrape shows what they have read last.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
    write_to_textfile,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from trinity_sync.errors import StackError, TrinitySyncError
from trinity_sync.layout import CORRUPTION_MARK, KINDS, Kind, step_folder, steps_on_disk
from trinity_sync.orchestration.job_registry import ANSWER_S, is_allowed
from trinity_sync.orchestration.report.steps import list_saves
from trinity_sync.orchestration.root_threads import RootVisits
from trinity_sync.orchestration.run_page import StepOutcome
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import job_id, list_registered_roots
from trinity_sync.snapshot.spool import list_job_spools
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.weights.state_files import read_sync_report

if TYPE_CHECKING:
    from trinity_sync.orchestration.on_node import Committed

logger = logging.getLogger(__name__)

_STALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, registry=self.registry)
        self._saves = counter(
            "trinity_sync_saves",
            "Runs of save-step that ended, and whether a flow or the saver has saved the step",
            ["job", "kind", "outcome", "by"],
        )
        self._phases = seconds(
            "trinity_sync_phase_seconds",
            "Seconds of a save from submission to commit: queue, write, commit",
            ["job", "kind", "phase"],
            buckets=_SECONDS,
        )
        self._stalls = seconds(
            "trinity_sync_stall_seconds",
            "Seconds for which a save stalled the training thread of the slowest rank of the role",
            ["job", "kind", "role"],
            buckets=_STALL_SECONDS,
        )
        self._bytes = counter(
            "trinity_sync_saved_bytes", "Bytes that were written and committed", ["job", "kind"]
        )
        self._alarms = counter(
            "trinity_sync_unhealthy_saves",
            "Committed saves with values that are not finite, or with parts that did not change",
            ["job", "kind"],
        )
        self._newest = gauge(
            "trinity_sync_newest_step", "Newest committed step of the kind", ["job", "kind"]
        )
        self._age = gauge(
            "trinity_sync_newest_commit_age_seconds",
            "Seconds since the newest commit of the kind",
            ["job", "kind"],
        )

    def count_committed_save(self, request: SaveRequest, done: "Committed") -> None:
        """Count a committed save, its bytes and its durations."""
        labels, timing = (request.job, request.kind), done.timing
        self.count_save(request, "committed", "saver" if done.by_saver else "flow")
        self._bytes.labels(*labels).inc(timing.nbytes)
        self._alarms.labels(*labels).inc(bool(done.alarms))
        for stall in timing.stalls:
            self._stalls.labels(*labels, stall.role).observe(stall.seconds)
        for phase in ("queue", "write", "commit"):
            self._phases.labels(*labels, phase).observe(getattr(timing, f"{phase}_s"))
        for kind in done.newest_of:
            self.update_newest(request.job, kind, request.step, done.committed_at)

    def count_save(self, request: SaveRequest, outcome: StepOutcome, by: str) -> None:
        """Count a save that a ``flow`` or the ``saver`` has ended."""
        self._saves.labels(request.job, request.kind, outcome, by).inc()

    def serve(self, settings: Settings, stack: StackSettings) -> int:
        """Serve the metrics at ``worker.metrics`` in a thread, and return the port.

        They include those of the node and of known jobs (`metrics`).

        Raises:
            StackError: The port is in use, or the host is not an address of this node.
        """
        where = stack.worker.metrics
        host, _, port = where.rpartition(":")
        try:
            server, _ = start_http_server(int(port), host.strip("[]"), registry=self.registry)
        except OSError as error:
            raise StackError(
                f"cannot serve metrics at {where}: {error.strerror}. Set worker.metrics to a free "
                "port, one for each worker of a node."
            ) from error
        self.registry.register(SpoolCollector(settings.spool))
        RootObserver(settings, stack, self.update_newest).start(self.registry)
        return int(server.server_port)

    def update_newest(self, job: str, kind: Kind, step: int, committed_at: float) -> None:
        """Update the newest step of a job: after a commit, and by the `RootObserver`."""
        self._newest.labels(job, kind).set(step)
        self._age.labels(job, kind).set_function(lambda: max(0.0, time.time() - committed_at))

    def write_gauges(self, settings: Settings, file: Path) -> None:
        """Write the gauges of the node and of known jobs to a file, as node_exporter reads them.

        Raises:
            OSError: The file cannot be written.
        """
        observer = RootObserver(settings, StackSettings(), self.update_newest)
        observer.observe()
        gauges = CollectorRegistry()
        for each in (self._newest, self._age, SpoolCollector(settings.spool), observer):
            gauges.register(each)
        write_to_textfile(str(file), gauges)


METRICS = WorkerMetrics()


OBSERVE_S = 60.0
"""Seconds between two looks at the roots."""
RECHECK_S = 600.0
"""Seconds after which corruption marks are looked up again: each is a request."""


class SpoolCollector(Collector):
    """Images that wait in the spool of this node, images that were lost, and free memory."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the spool."""
        pending, age = (
            GaugeMetricFamily(f"trinity_sync_pending_{name}", text, labels=["job"])
            for name, text in (
                ("images", "Sealed images that are not committed"),
                ("age_seconds", "Seconds since the oldest of them was sealed"),
            )
        )
        try:
            for job in list_job_spools(self._spool):
                sealed, _ = job.tickets()
                now = time.monotonic()
                ages = [image.ticket.age_s(now) for image in sealed]
                pending.add_metric([job.folder.name], len(sealed))
                age.add_metric([job.folder.name], max(ages, default=0.0))
        except (OSError, TrinitySyncError) as error:
            logger.warning("cannot read the spool %s for metrics: %s", self._spool, error)
        yield from (pending, age)
        yield GaugeMetricFamily(
            "trinity_sync_spool_free_bytes",
            "Free bytes of the file system of the spool",
            value=self._read_free_bytes(),
        )

    def _read_free_bytes(self) -> int:
        """Return the free bytes where the spool is, or will be after the first save."""
        for folder in (self._spool, *self._spool.parents):
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                continue
        return 0


@dataclass(frozen=True)
class _Observed:
    """A job as its root showed it."""

    job: str
    newest: dict[Kind, Manifest]
    """Commits that the latest pointers name."""
    counted_at: float
    """When the corrupted steps were counted, by ``time.monotonic``."""
    values: dict[str, dict[str, float]]
    """Of each of `GAUGES`, by its label; "" for one without a label."""


GAUGES = {
    "trinity_sync_corrupted_steps": ("Steps on disk that are corrupted", ""),
    "trinity_sync_failed_saves": ("Saves that failed since the newest commit", ""),
    "trinity_sync_root_free_bytes": ("Free bytes of the root's file system", ""),
    "trinity_sync_reader_lag_steps": (
        "Steps that a reader is behind the newest version of the weights",
        "reader",
    ),
    "trinity_sync_step_metric": ("Metrics that the run recorded for its newest step", "metric"),
}
"""Gauges of each known job: what they are, and their label besides that of the job."""


class RootObserver(Collector):
    """Corrupted steps, failed saves, free disk, lag of readers and recorded metrics, of known jobs.

    A root that cannot be read, or hangs, is logged once, and its metrics are left out until it can
    be read. ``on_newest`` is called with a job, a kind, and the step and time of its newest commit.
    """

    def __init__(
        self,
        settings: Settings,
        stack: StackSettings,
        on_newest: Callable[[str, Kind, int, float], None],
    ) -> None:
        self._settings = settings
        self._stack = stack
        self._on_newest = on_newest
        self._observed: dict[Path, _Observed] = {}
        self._errors: dict[Path, str] = {}
        self._visits = RootVisits("metrics")

    def start(self, registry: CollectorRegistry) -> None:
        """Observe in a daemon thread from now on, and show the result in a registry."""
        registry.register(self)
        threading.Thread(target=self._run, name="observe-roots", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.observe()
            pause.wait(OBSERVE_S)

    def observe(self) -> None:
        """Read the roots of all known jobs; never raises."""
        errors: dict[Path, str] = {}
        try:
            registered = list_registered_roots(self._settings.home)
        except Exception as error:
            registered, errors[self._settings.home] = [], str(error)
        found = self._visits.visit(registered, self._observe, limit_s=ANSWER_S)
        errors |= {root: each for root, each in found.items() if isinstance(each, str)}
        for path, why in errors.items():
            if self._errors.get(path) != why:
                logger.warning("cannot read %s for metrics: %s", path, why)
        self._observed = {root: each for root, each in found.items() if isinstance(each, _Observed)}
        self._errors = errors
        for each in self._observed.values():
            for kind, newest in each.newest.items():
                self._on_newest(each.job, kind, newest.step, newest.committed_at)

    def _observe(self, root: Path) -> _Observed | str | None:
        """Return a job as its root shows it, None if there is none, or why it cannot be read."""
        try:
            if not (_exists(root) and is_allowed(self._stack, root)):
                return None
            return _observe(self._settings, root, self._observed.get(root))
        except Exception as error:  # the others are unaffected, and the thread goes on
            return str(error)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return what was observed last."""
        for name, (text, label) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["job", *([label] if label else [])])
            for each in self._observed.values():
                for value_of, value in each.values[name].items():
                    gauge.add_metric([each.job, *([value_of] if label else [])], value)
            yield gauge


def _exists(root: Path) -> bool:
    """Return whether a root exists; raises if that cannot be told."""
    try:
        root.stat()
    except FileNotFoundError:
        return False
    return True


def _observe(settings: Settings, root: Path, before: _Observed | None) -> _Observed:
    report, now = read_sync_report(root, time.time()), time.monotonic()
    readers = report.readers if report and report.running is not False else ()
    newest = {}
    for kind in KINDS:
        step = read_latest_pointer(root, kind)
        # its head alone: with thousands of ranks, the files are in parts
        if step is not None and (manifest := read_manifest(root, step, ranks=())):
            newest[kind] = manifest
    if before and now - before.counted_at < RECHECK_S:
        corrupted, counted_at = before.values["trinity_sync_corrupted_steps"], before.counted_at
    else:
        marks = (step_folder(root, step) / CORRUPTION_MARK for step in steps_on_disk(root))
        corrupted, counted_at = {"": float(sum(mark.exists() for mark in marks))}, now
    statuses = [each.status for each in list_saves(settings, root)]
    failed = [*takewhile(lambda status: status != "committed", statuses)].count("failed")
    last = max(newest.values(), key=lambda manifest: manifest.step, default=None)
    values: dict[str, dict[str, float]] = {
        "trinity_sync_corrupted_steps": corrupted,
        "trinity_sync_failed_saves": {"": failed},
        "trinity_sync_root_free_bytes": {"": shutil.disk_usage(root).free},
        "trinity_sync_reader_lag_steps": {reader.name: reader.behind for reader in readers},
        "trinity_sync_step_metric": read_metrics(root, last.run, last.step) if last else {},
    }
    return _Observed(job_id(root), newest, counted_at, values)
