"""Settings, read from the environment (``TRINITY_SYNC_*``).

Trainer ranks, Ray tasks and the flow worker each read their own environment. Values that have to
agree between them (paths, run, step) are in tickets and in the flow's parameters.
"""

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


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

    roles: Annotated[tuple[str, ...], NoDecode] = ("actor",)
    """Roles that make one checkpoint together, with commas between them: ``actor,critic``."""

    slots: int = Field(default=2, ge=1, le=4)
    """Slots per shard; with two, one image is persisted while the next is staged."""

    slot_wait_s: float = Field(default=300.0, ge=0)
    """Seconds for which a save waits for the writer of a checkpoint if its images hold all slots;
    afterwards it evicts them. It is below the time-out of NCCL, since other ranks may wait in a
    collective. Weights are evicted for newer ones after 10 seconds."""

    overlap: bool = False
    """Whether veRL's manager stages while the next forward and backward pass runs."""

    check_overlap: bool = False
    """Compare each overlapped image with a digest taken at the call, which detects every change.
    The call then reads the state once, in about half the time of a copy."""

    direct_io: bool = True
    """Write shards with direct I/O if the file system supports it."""

    writers: int = Field(default=4, ge=1)
    """Shards that one task writes at a time."""

    nice: int = Field(default=10, ge=0, le=19)
    """Nice value of threads that write files or compute deltas, and of the embedded server and
    worker."""

    recycle: bool | Literal["always"] = True
    """Keep large files of removed steps, whose disk blocks the next saves overwrite: about twice as
    fast. On a file system that other nodes may see, only ``always`` does so."""

    write_mb_per_s: float = Field(default=0.0, ge=0)
    """Speed limit of each writer in MB/s; 0 for none."""

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

    @field_validator("roles", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
