"""Settings, read once from the environment (``TRINITY_SYNC_*``) and passed on as a value.

Trainer ranks, Ray workers and the flow worker each read their own environment; what must agree
between them (paths, run, step) travels in tickets and in the flow's parameters instead.
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
    """All knobs of trinity_sync; every field can be set as ``TRINITY_SYNC_<FIELD>``."""

    model_config = SettingsConfigDict(
        env_prefix="TRINITY_SYNC_", env_ignore_empty=True, frozen=True
    )

    spool: Path = Field(default_factory=_default_spool)
    """Folder in shared memory that holds the slots and tickets of this node."""

    node: str = Field(default_factory=socket.gethostname, pattern=r"^[^/\s]+$")
    """Name of this node, under which Ray has to know it: its host name, or that of
    ``ray start --node-name``."""

    roles: tuple[str, ...] = ("actor",)
    """Roles that make one checkpoint together; JSON in the environment: ``["actor","critic"]``."""

    slots: int = Field(default=2, ge=1, le=4)
    """Slots per shard: with two, one image is written while the next one is staged."""

    slot_wait_s: float = Field(default=30.0, ge=0)
    """Seconds after its seal for which an image that nobody writes keeps its slot, when a new save
    finds all taken. Older ones give way at once, so training goes on while a server is away."""

    overlap: bool = False
    """Whether veRL's manager stages while the next forward and backward pass runs."""

    check_overlap: bool = False
    """Compare each overlapped image with a digest taken at the call, and name what changed, whoever
    changed it. The call then reads the state once, which takes about half of a copy."""

    gather_s: float = Field(default=60.0, gt=0)
    """Seconds that a flow waits for every rank and role to hand its part over."""

    direct_io: bool = True
    """Write shards past the page cache where the file system allows it."""

    writers: int = Field(default=4, ge=1)
    """Shards that one task writes at a time."""

    save_strategy: SaveStrategy = "unrestricted"
    """How many shards are written at once: ``unrestricted``; ``single_process``, one of each rank;
    ``single_node``, one on each node; ``single_thread``, one of the job, on whatever node. That of
    the trainer counts."""

    nice: int = Field(default=10, ge=0, le=19)
    """By how much the threads that write or make deltas, and the embedded server and worker, yield
    to training."""

    recycle: bool | Literal["always"] = True
    """Keep large files of removed steps for the next saves to write over: about twice as fast. On
    a file system that other nodes may see only with ``always``."""

    remote: str = ""
    """URL of the remote that every checkpoint is copied to, ``{job}`` standing for the job's name:
    ``s3://bucket/{job}``; empty for none. It holds no credentials. One job a URL."""

    remote_required: bool = False
    """Whether a checkpoint counts only once it is in the remote. Rank 0 then writes the URL into
    the root when the job begins, and the root's holds from then on. Otherwise a copy follows the
    commit as a flow run of its own."""

    remote_keep: str = "all"
    """Which checkpoints stay in the remote; as ``keep``, without metrics."""

    write_mb_per_s: float = Field(default=0.0, ge=0)
    """Speed limit of each writer in MB/s, so that saves leave the disk to others; 0 for none."""

    keep: str = "all"
    """Which checkpoints the retention flow keeps, see ``retention.policies.parse_policy``."""

    keep_syncs: str = "last=2"
    """As ``keep``, for steps of weights only: the next one supersedes them, so two are enough."""

    keep_quarantine: str = "all"
    """As ``keep``, for folders in quarantine, such as ``newer=30d``; a rewind makes one."""

    host: str = "127.0.0.1"
    """Address at which the embedded server and Ray node are reached. With any other than the
    default, further machines can join, and the server asks for a password."""

    ray_address: str = ""
    """Ray cluster that the stack's tasks run on, as ``host:port``; empty for a node of the stack's
    own. ``RAY_ADDRESS``, which names the cluster of a training, plays no part."""

    ray_python: str = ""
    """Path of the stack's Python on the nodes of that cluster, where they were started from another
    environment; Ray and Python have to be of the same versions in both."""

    work_pool: str = "trinity-sync"
    """Prefect work pool (of type ``trinity-sync``) that the deployments belong to."""

    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two polls of the flow worker, when no event has woken it before."""

    runs_at_once: int = Field(default=4, ge=0)
    """Flow runs of each work queue that a worker executes at a time; 0 for no limit."""

    silent_s: float = Field(default=120.0, ge=10)
    """Seconds without a heartbeat (they come every 30) after which the server shows a flow run as
    crashed; read by ``deploy``. Prefect allows no fewer than 10."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port at which the flow worker answers Prometheus; 0 for none."""

    metrics_host: str = "127.0.0.1"
    """Address at which it does; ``0.0.0.0`` for all of the node's."""

    home: Path = Field(default_factory=lambda: Path.home() / ".trinity_sync")
    """Folder of the embedded stack: its database, logs and state file."""

    maintain: tuple[Path, ...] = ()
    """Roots of the jobs that scheduled flows look after; JSON in the environment:
    ``["/data/ckpts"]``. By default all jobs that have committed something on the node."""

    allowed: tuple[Path, ...] = ()
    """Folders below which flows may work: roots, exports and stores of the node; JSON in the
    environment. Empty for everywhere, as far as the user may."""

    schedules: bool = True
    """Whether the schedules of the deployments run when they are deployed first, or are paused."""

    catalog_url: str = ""
    """SQLAlchemy URL of the catalog; SQLite in ``home`` if it is empty."""

    keep_events_h: float = Field(default=6.0, ge=0)
    """Hours for which the embedded server keeps its event feed; 0 keeps none. Runs, tasks, logs
    and artifacts do not need it."""

    keep_runs_h: float = Field(default=30 * 24.0, gt=1)
    """Hours for which the embedded server keeps ended runs, with their tasks and artifacts."""

    def remote_of(self, root: str | Path) -> str:
        """Return the URL of a job's folder in the remote; empty if there is none.

        Args:
            root: the job's root.
        """
        return self.remote.replace("{job}", job_id(root))
