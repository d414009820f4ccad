"""Prometheus metrics of a flow worker, of its node, and of the jobs that it knows.

They are served if ``worker.metrics`` is set. Each worker counts its own saves, so sum over workers.
The newest step of each known job is also read from its root, for saves of other workers.

The spool is in memory and is read at each scrape. Roots are on file systems that may hang: threads
read them every `OBSERVE_S` seconds, and a scrape shows what they have read last.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import EvictedError, StackError, SupersededError, TrinitySyncError
from trinity_sync.layout import (
    CORRUPTION_MARK,
    KINDS,
    MANIFEST,
    SERVES_AS,
    Kind,
    step_folder,
    steps_on_disk,
)
from trinity_sync.orchestration.job_registry import ANSWER_S, is_allowed, list_registered_roots
from trinity_sync.orchestration.root_threads import RootVisits
from trinity_sync.orchestration.run_page import StepOutcome
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import list_job_spools
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.save import Persisted, find_stalls, find_submission
from trinity_sync.weights.state_files import read_sync_report

logger = logging.getLogger(__name__)

_STALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


def get_outcome(error: Exception) -> StepOutcome:
    """Return how a save ended that raised an error."""
    if isinstance(error, SupersededError):
        return "superseded"
    return "evicted" if isinstance(error, EvictedError) else "failed"


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self) -> None:
        self._newest_steps: dict[tuple[str, Kind], tuple[str | None, int, float]] = {}
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self._saves = Counter(
            "trinity_sync_saves",
            "Runs of save-step that ended",
            ["job", "kind", "outcome"],
            registry=self.registry,
        )
        self._phases = Histogram(
            "trinity_sync_phase_seconds",
            "Seconds of a save from submission to commit: queue, write, commit",
            ["job", "kind", "phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stalls = Histogram(
            "trinity_sync_stall_seconds",
            "Seconds for which a save stalled the training thread of the slowest rank of the role",
            ["job", "kind", "role"],
            buckets=_STALL_SECONDS,
            registry=self.registry,
        )
        self._bytes = Counter(
            "trinity_sync_saved_bytes",
            "Bytes that were written and committed",
            ["job", "kind"],
            registry=self.registry,
        )
        self._newest = Gauge(
            "trinity_sync_newest_step",
            "Newest committed step of the kind",
            ["job", "kind"],
            registry=self.registry,
        )
        self._age = Gauge(
            "trinity_sync_newest_commit_age_seconds",
            "Seconds since the newest commit of the kind",
            ["job", "kind"],
            registry=self.registry,
        )

    def count_committed_save(
        self,
        request: SaveRequest,
        persisted: Iterable[Persisted],
        *,
        started_at: float,
        persisted_at: float,
        committed_at: float,
    ) -> None:
        """Count a committed save, its bytes and its durations.

        Times are in seconds since the epoch: the flow run's start, all files durable, and the end
        of the commit task.
        """
        labels = (request.job, request.kind)
        written = [file for result in persisted for file in result.written]
        for stall in find_stalls(written):
            self._stalls.labels(*labels, stall.role).observe(stall.seconds)
        if submitted_at := find_submission(written):
            self._phases.labels(*labels, "queue").observe(max(started_at - submitted_at, 0.0))
        self._saves.labels(*labels, "committed").inc()
        self._phases.labels(*labels, "write").observe(max(persisted_at - started_at, 0.0))
        self._phases.labels(*labels, "commit").observe(max(committed_at - persisted_at, 0.0))
        self._bytes.labels(*labels).inc(
            sum(file.record.nbytes for file in written if file.temporary)
        )
        weights = not written or any(file.record.is_weights for file in written)
        for kind in SERVES_AS[request.kind] if weights else (request.kind,):
            self._update_newest(request.job, kind, request.run_key, request.step, time.time())

    def count_failed_save(self, request: SaveRequest, outcome: StepOutcome) -> None:
        """Count a save that was not committed: ``failed``, ``evicted`` or ``superseded``."""
        self._saves.labels(request.job, request.kind, outcome).inc()

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
        RootObserver(settings, stack, self.read_newest).start(self.registry)
        return int(server.server_port)

    def read_newest(self, job: str, kind: Kind, newest: Manifest) -> None:
        """Update the newest step of a job from its root, see `RootObserver`."""
        self._update_newest(job, kind, None, newest.step, newest.committed_at)

    def _update_newest(
        self, job: str, kind: Kind, run_key: str | None, step: int, committed_at: float
    ) -> None:
        """Update the newest step of a job, unless a later step of the same run is known.

        Saves of a run may end out of order. Run numbers are not compared, because they start again
        in a root that was removed and recreated. A step read from the root (``run_key`` is None)
        yields to every commit of this worker, unless it was committed later: by another worker.
        """
        with self._lock:
            known = self._newest_steps.get((job, kind))
            if known and known[0] is not None and run_key is None and committed_at <= known[2]:
                return
            if known and run_key is not None and run_key == known[0] and step < known[1]:
                return
            self._newest_steps[job, kind] = run_key, step, committed_at
            self._newest.labels(job, kind).set(step)
            self._age.labels(job, kind).set_function(lambda: max(0.0, time.time() - committed_at))


METRICS = WorkerMetrics()


OBSERVE_S = 60.0
"""Seconds between two looks at the roots."""
RECHECK_S = 600.0
"""Seconds after which corruption marks are looked up again of all steps, not of new ones only."""


class SpoolCollector(Collector):
    """Images that wait in the spool of this node, images that were lost, and free memory."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the spool."""
        pending = GaugeMetricFamily(
            "trinity_sync_pending_images", "Sealed images that are not committed", labels=["job"]
        )
        age = GaugeMetricFamily(
            "trinity_sync_pending_age_seconds",
            "Seconds since the oldest of them was sealed",
            labels=["job"],
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
        free = GaugeMetricFamily(
            "trinity_sync_spool_free_bytes", "Free bytes of the file system of the spool"
        )
        free.add_metric([], self._read_free_bytes())
        yield free

    def _read_free_bytes(self) -> int:
        """Return the free bytes where the spool is, or will be after the first save."""
        for folder in (self._spool, *self._spool.parents):
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                continue
        return 0


@dataclass
class _Root:
    """What earlier rounds have read of a root, so that a round reads only what has changed."""

    newest: dict[Kind, tuple[int, ...]] = field(default_factory=dict)
    """Newest step of each kind, with inode and time of change of its manifest."""
    checked: set[int] = field(default_factory=set)
    """Steps whose corruption marks were looked up."""
    corrupted: set[int] = field(default_factory=set)
    checked_at: float = -math.inf
    """When the marks of all steps were looked up, by ``time.monotonic``."""


@dataclass(frozen=True)
class _Observed:
    """A job as its root showed it."""

    job: str
    corrupted: int
    free_bytes: int
    lags: dict[str, int]
    """Steps that each reader is behind the newest version, by its name."""


class RootObserver(Collector):
    """Corrupted steps, free disk space and the lag of readers, of the jobs that this node knows.

    A root that cannot be read, or hangs, is logged once, and its metrics are left out until it can
    be read. ``on_newest`` is called with a job, a kind and the newest commit that is found.
    """

    def __init__(
        self,
        settings: Settings,
        stack: StackSettings,
        on_newest: Callable[[str, Kind, Manifest], None],
    ) -> None:
        self._settings = settings
        self._stack = stack
        self._on_newest = on_newest
        self._observed: Sequence[_Observed] = ()
        self._roots: dict[Path, _Root] = {}
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
        """Read what has changed in the roots of all known jobs; never raises."""
        errors: dict[Path, str] = {}
        try:
            registered = list_registered_roots(self._settings)
        except Exception as error:
            registered, errors[self._settings.home] = [], str(error)
        found = self._visits.visit(registered, self._observe, limit_s=ANSWER_S)
        errors |= {root: each for root, each in found.items() if isinstance(each, str)}
        for path, why in errors.items():
            if self._errors.get(path) != why:
                logger.warning("cannot read %s for metrics: %s", path, why)
        self._observed = [each for each in found.values() if isinstance(each, _Observed)]
        self._errors = errors

    def _observe(self, root: Path) -> _Observed | str | None:
        """Return a job as its root shows it, None if there is none, or why it cannot be read."""
        known = self._roots.pop(root, _Root())
        try:
            if not (_exists(root) and is_allowed(self._stack, root)):
                return None
            self._report_newest(root, known)
            observed = _observe(root, known)
        except Exception as error:  # the others are unaffected, and the thread goes on
            return str(error)
        self._roots[root] = known
        return observed

    def _report_newest(self, root: Path, known: _Root) -> None:
        """Report the steps that the latest pointers name, if they have changed."""
        read: dict[int, Manifest | None] = {}
        for kind in KINDS:
            step = read_latest_pointer(root, kind)
            if step is None:
                continue
            try:
                file = (step_folder(root, step) / MANIFEST).stat()
            except FileNotFoundError:  # a step of another system
                continue
            newest = (step, file.st_ino, file.st_mtime_ns)  # a later run may commit it again
            if known.newest.get(kind) == newest:
                continue
            if step not in read:
                read[step] = read_manifest(root, step)
            if manifest := read[step]:
                self._on_newest(job_id(root), kind, manifest)
                known.newest[kind] = newest

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return what was observed last."""
        corrupted = GaugeMetricFamily(
            "trinity_sync_corrupted_steps", "Steps on disk that are corrupted", labels=["job"]
        )
        free = GaugeMetricFamily(
            "trinity_sync_root_free_bytes", "Free bytes of the root's file system", labels=["job"]
        )
        lag = GaugeMetricFamily(
            "trinity_sync_reader_lag_steps",
            "Steps that a reader is behind the newest version of the weights",
            labels=["job", "reader"],
        )
        for each in self._observed:
            corrupted.add_metric([each.job], each.corrupted)
            free.add_metric([each.job], each.free_bytes)
            for reader, behind in each.lags.items():
                lag.add_metric([each.job, reader], behind)
        yield from (corrupted, free, lag)


def _exists(root: Path) -> bool:
    """Return whether a root exists; raises if that cannot be told."""
    try:
        root.stat()
    except FileNotFoundError:
        return False
    return True


def _observe(root: Path, known: _Root) -> _Observed:
    report = read_sync_report(root, time.time())
    readers = report.readers if report and report.running is not False else ()
    return _Observed(
        job=job_id(root),
        corrupted=_count_corrupted(root, known),
        free_bytes=shutil.disk_usage(root).free,
        lags={reader.name: reader.behind for reader in readers},
    )


def _count_corrupted(root: Path, known: _Root) -> int:
    """Return the number of steps with a corruption mark; looks up few, as each is a request."""
    steps, now = set(steps_on_disk(root)), time.monotonic()
    if now - known.checked_at >= RECHECK_S:
        known.checked, known.corrupted, known.checked_at = set(), set(), now
    new = {
        step
        for step in steps - known.checked
        if (step_folder(root, step) / CORRUPTION_MARK).exists()
    }
    known.checked, known.corrupted = steps, (known.corrupted & steps) | new
    return len(known.corrupted)
