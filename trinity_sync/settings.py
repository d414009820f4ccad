"""Settings, read from the environment (``TRINITY_SYNC_*``).

Trainer ranks, Ray tasks and the flow worker each read their own environment. Values that have to
agree between them (paths, run, step) are in tickets and in the flow's parameters.
"""

import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from trinity_sync.layout import SaveStrategy, job_id


def _default_spool() -> Path:
    return Path(f"/dev/shm/trinity_sync-{os.getuid()}")


class Settings(BaseSettings):
    """The settings of trinity_sync; the variable of a field is ``TRINITY_SYNC_<FIELD>``."""

    model_config = SettingsConfigDict(
        env_prefix="TRINITY_SYNC_", env_ignore_empty=True, frozen=True
    )

    spool: Path = Field(default_factory=_default_spool)
    """Folder in shared memory for the slots and tickets of this node."""

    node: str = Field(default_factory=socket.gethostname, pattern=r"^[^/\s]+$")
    """Name of this node in Ray: the host name, or the value of ``ray start --node-name``."""

    roles: tuple[str, ...] = ("actor",)
    """Roles that make one checkpoint together; JSON in the environment: ``["actor","critic"]``."""

    slots: int = Field(default=2, ge=1, le=4)
    """Slots per shard; with two, one image is persisted while the next is staged."""

    slot_wait_s: float = Field(default=30.0, ge=0)
    """Seconds after its seal in which an image that is not being persisted cannot be evicted. If
    all slots are in use, a save evicts an older image at once, so training continues."""

    overlap: bool = False
    """Whether veRL's manager stages while the next forward and backward pass runs."""

    check_overlap: bool = False
    """Compare each overlapped image with a digest taken at the call, which detects every change.
    The call then reads the state once, in about half the time of a copy."""

    gather_s: float = Field(default=60.0, gt=0)
    """Seconds that a flow waits for all ranks and roles to submit their images."""

    direct_io: bool = True
    """Write shards with direct I/O if the file system supports it."""

    writers: int = Field(default=4, ge=1)
    """Shards that one task writes at a time."""

    save_strategy: SaveStrategy = "unrestricted"
    """Write concurrency: ``unrestricted``; ``single_process``, one shard of each rank at a time;
    ``single_node``, one on each node; ``single_thread``, one of the job. The trainer's value
    applies."""

    nice: int = Field(default=10, ge=0, le=19)
    """Nice value of threads that write files or compute deltas, and of the embedded server and
    worker."""

    recycle: bool | Literal["always"] = True
    """Keep large files of removed steps, whose disk blocks the next saves overwrite: about twice as
    fast. On a file system that other nodes may see, only ``always`` does so."""

    remote: str = ""
    """URL of the remote to which checkpoints are copied, such as ``s3://bucket/{job}``, where
    ``{job}`` stands for the job's identifier; empty for none. No credentials, one job for each URL.
    """

    remote_required: bool = False
    """Whether a checkpoint counts only once it is in the remote. Rank 0 then writes the URL into
    the root when the job begins, and that URL is used from then on. Otherwise a flow run of its own
    copies the checkpoint after the commit."""

    remote_keep: str = "all"
    """Retention policy of checkpoints in the remote: as ``keep``, without metrics."""

    write_mb_per_s: float = Field(default=0.0, ge=0)
    """Speed limit of each writer in MB/s; 0 for none."""

    keep: str = "all"
    """Retention policy of checkpoints; see ``retention.policies.parse_policy``."""

    keep_syncs: str = "last=2"
    """Retention policy of steps with weights only: the next one supersedes them, so two suffice."""

    keep_quarantine: str = "all"
    """Retention policy of quarantined steps, such as ``newer=30d``."""

    host: str = "127.0.0.1"
    """Address of the embedded server and Ray node. With another address than the default, further
    machines can join, and the server requires a password."""

    ray_address: str = ""
    """Ray cluster of the stack's tasks, as ``host:port``; empty for a Ray node of the stack's own.
    ``RAY_ADDRESS``, which names the training's cluster, is not read."""

    ray_python: str = ""
    """Path of the stack's Python on the nodes of that cluster, if they run another environment,
    which needs the same versions of Ray and Python."""

    work_pool: str = "trinity-sync"
    """Prefect work pool (of type ``trinity-sync``) that the deployments belong to."""

    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two polls of the flow worker, unless an event wakes it before."""

    runs_at_once: int = Field(default=4, ge=0)
    """Most flow runs of a work queue that a worker executes at a time; 0 for no limit."""

    silent_s: float = Field(default=120.0, ge=10)
    """Seconds without a heartbeat (one every 30) after which the server marks a flow run as
    crashed; applied by ``deploy``. Prefect requires at least 10."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the flow worker's Prometheus metrics; 0 for none."""

    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus metrics; ``0.0.0.0`` for all addresses of the node."""

    home: Path = Field(default_factory=lambda: Path.home() / ".trinity_sync")
    """Folder of the embedded stack: its database, logs and state file."""

    maintain: tuple[Path, ...] = ()
    """Roots of the jobs that scheduled flows maintain; JSON in the environment:
    ``["/data/ckpts"]``. By default all jobs that have committed a step on the node."""

    allowed: tuple[Path, ...] = ()
    """Folders below which flows may read and write roots, exports and local remotes; JSON in the
    environment. Empty for no restriction."""

    schedules: bool = True
    """Whether the schedules of new deployments are active; False for paused."""

    catalog_url: str = ""
    """SQLAlchemy URL of the catalog; SQLite in ``home`` if it is empty."""

    keep_events_h: float = Field(default=6.0, ge=0)
    """Hours for which the embedded server keeps events; 0 for none. Runs, tasks, logs and artifacts
    do not need them."""

    keep_runs_h: float = Field(default=30 * 24.0, gt=1)
    """Hours for which the embedded server keeps finished flow runs, with tasks and artifacts."""

    def remote_of(self, root: str | Path) -> str:
        """Return the URL of a job's folder in the remote; empty if there is none.

        Args:
            root: the job's root.
        """
        return self.remote.replace("{job}", job_id(root))
