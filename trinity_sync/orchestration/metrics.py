"""Prometheus metrics of a flow worker, served if ``metrics_port`` is set.

Each worker counts its own saves, so sum over workers. The newest step of each known job is also
read from its root, for saves of other workers.
"""

import threading
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import EvictedError, StackError, SupersededError
from trinity_sync.layout import SERVES_AS, Kind
from trinity_sync.orchestration.node_metrics import RootObserver, SpoolCollector
from trinity_sync.orchestration.run_page import StepOutcome
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.save import Persisted
from trinity_sync.storage.save_timing import find_stalls, find_submission

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

        They include those of the node and of known jobs (`node_metrics`).

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
