"""Settings of a process, read from the environment, and of a stack, read from a file.

`Settings` are those of any process: trainer ranks, rollout workers, the flow worker and Ray tasks.
Each reads its own environment. Values that have to agree between them (paths, run, step) are in
tickets and in the flow's parameters.

`StackSettings` are those of a stack's processes, in the file ``trinity_sync.toml``. It is the one
that ``TRINITY_SYNC_CONFIG`` names, otherwise ``~/.config/trinity_sync/trinity_sync.toml``,
otherwise ``/etc/trinity_sync/trinity_sync.toml``. Neither the working folder nor a project is
searched: a stack outlives both. Paths in variables may be relative to the working folder of the
process that reads them first, and begin with ``~``. A variable such as
``TRINITY_SYNC_STACK__SERVER__PORT`` goes before the file.
"""

import os
import socket
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from trinity_sync.errors import ConfigError
from trinity_sync.fs.file_system import find_mount
from trinity_sync.settings.values import (
    Duration,
    FullPath,
    Names,
    Paths,
    Share,
    explain,
    explain_unknown_variables,
    make_absolute,
    require_port,
    require_time_zone,
    show_value,
    to_text,
)

CONFIG_FILE = "trinity_sync.toml"
CONFIG = "TRINITY_SYNC_CONFIG"
"""Environment variable with the path of the stack's file; ``/dev/null`` for none."""


def find_config_file() -> Path | None:
    """Return the path of the stack's file; None if there is none.

    Raises:
        ConfigError: ``TRINITY_SYNC_CONFIG`` names a file that does not exist.
    """
    _resolve_variables()
    if named := os.environ.get(CONFIG):
        if not Path(named).exists():
            raise ConfigError(
                f"there is no file {named}, which {CONFIG} names; write one with: "
                f"trinity-sync config init {named}"
            )
        return Path(named)
    user = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    folders = (Path(os.path.expanduser(user)), Path("/etc"))  # noqa: PTH111, it never fails
    paths = (folder / "trinity_sync" / CONFIG_FILE for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def use_config_file(path: str) -> Iterator[None]:
    """Let a file count in a ``with`` block, unless ``TRINITY_SYNC_CONFIG`` names another.

    An empty path changes nothing.
    """
    if not path or os.environ.get(CONFIG):
        yield
        return
    os.environ[CONFIG] = path
    try:
        yield
    finally:
        os.environ.pop(CONFIG, None)


def read_config_file() -> dict[str, Any]:
    """Return the content of the stack's file, which is not validated; empty without one.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    path = find_config_file()
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


PREFIX = "TRINITY_SYNC_"
STACK_PREFIX = "TRINITY_SYNC_STACK__"
LOCAL_HOST = "127.0.0.1"
"""Host of a stack that no other machine can join."""
RAY_FOLDER = "trinity-ray-"
"""Prefix of the folder in ``/tmp`` of a stack's own Ray node."""


def _resolve_variables() -> None:
    """Make the paths in variables absolute, for a later ``chdir`` and for child processes."""
    for name in (CONFIG, f"{PREFIX}SPOOL", f"{PREFIX}HOME"):
        if path := os.environ.get(name):
            os.environ[name] = str(make_absolute(path))


class _Environment(EnvSettingsSource):
    """Variables of the environment, whose lists are text if they are not JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Return a list in JSON as such, and other text as it is, for the validators."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


class _ReadSettings(BaseSettings):
    """Base of the settings: what is wrong in them is a `ConfigError`."""

    def __init__(self, **values: Any) -> None:
        if unknown := explain_unknown_variables(PREFIX, list_variables()):
            raise ConfigError(unknown)
        _resolve_variables()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        fields: dict[tuple[str, ...], FieldInfo]
        fields = {(name,): field for name, field in cls.model_fields.items()}
        return explain(error, PREFIX, fields)


def default_home(mountinfo: str | None = None) -> Path:
    """Return the folder of this user's stack on this host, on a local file system.

    A home directory is often shared by many nodes, and locks of SQLite do not hold there.

    Args:
        mountinfo: Text in the form of ``/proc/self/mountinfo``, which is read by default.
    """
    host = socket.gethostname()
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
        home = Path(state) / "trinity_sync" / host
        if home.is_absolute() and not find_mount(home, mountinfo).shared:
            return home
    except RuntimeError:  # the user has no home directory
        pass
    return Path(f"/var/tmp/trinity_sync-{os.getuid()}") / host


class Settings(_ReadSettings):
    """The settings of a process; the variable of a field is ``TRINITY_SYNC_<FIELD>``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    spool: FullPath = Field(default_factory=lambda: Path(f"/dev/shm/trinity_sync-{os.getuid()}"))
    """Folder in shared memory for the slots and tickets of this node; by default
    ``/dev/shm/trinity_sync-<uid>``."""

    node: str = Field(default_factory=socket.gethostname, pattern=r"^[^/\s]+$")
    """Name of this node in Ray: by default the host name; with ``ray start --node-name``, that
    name."""

    roles: Names = ("actor",)
    """Roles that make one checkpoint together, with commas between them: ``actor,critic``."""

    slots: int = Field(default=2, ge=1, le=4)
    """Slots per shard; with two, one image is persisted while the next is staged."""

    slot_wait_s: float = Field(default=300.0, ge=0)
    """Seconds for which a save waits for the writer of a checkpoint if its images hold all slots;
    afterwards it evicts them. It is below the time-out of NCCL, since other ranks may wait in a
    collective. Weights are evicted for newer ones after 10 seconds."""

    overlap: bool | Literal["check"] = False
    """Whether veRL's manager stages while the next forward and backward pass runs. With ``check``,
    each overlapped image is compared with a digest taken at the call, which detects every change of
    the state meanwhile; the call then reads the state once, in about half the time of a copy."""

    run_key: str = ""
    """Key of the training's run: the same in all of its processes. A random part is added, which
    those that live at one time share. By default the launcher's, or a random key."""

    saver: Literal["auto", "stack", "built-in"] = "auto"
    """What commits saves: flow runs of the ``stack``; or the ``built-in`` saver, a process that the
    first save starts on each node. With ``auto``, the stack if one is known, and the saver what it
    does not begin in ``saver_after_s``; otherwise the saver. It also requests the flow runs."""

    saver_after_s: float = Field(default=30.0, gt=0)
    """Seconds after which the saver commits what a stack has not begun, or no longer writes, as if
    its queue is paused or full; none where server or worker do not answer. At most 5 while a save
    waits for a slot, or a start for a save."""

    take_over: bool = False
    """Whether a start of the training supersedes an earlier one that is still running. Otherwise it
    waits for its end, and is refused if it does not end."""

    save_by: Duration = Field(default=timedelta(0), examples=["03:55:00"])
    """Time after the start of a trainer by which it has made its emergency save: somewhat less than
    the scheduler's limit; ``0s`` for none. A Slurm job's limit counts as well where Slurm tells it,
    in ``SLURM_JOB_END_TIME``."""

    trusted_paths: Paths = Field(default=(), examples=[("/data",)])
    """Folders whose files are unpickled in full, although others than this user can write them;
    separated by ``:``. Files of this user are always trusted."""

    home: FullPath = Field(default_factory=default_home)
    """Folder of the stack on this host: its database, logs and state file. By default
    ``~/.local/state/trinity_sync/<host>`` (``XDG_STATE_HOME`` counts), or
    ``/var/tmp/trinity_sync-<uid>/<host>`` if the former is on a network file system."""

    def to_variables(self) -> dict[str, str]:
        """Return environment variables with all values."""
        values = self.model_dump(mode="json").items()
        return {f"{PREFIX}{name.upper()}": to_text(value) for name, value in values}

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *_others: Any, **_more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments go before variables."""
        return init_settings, _Environment(settings_cls)


class _Section(BaseModel):
    """A section of the stack's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ServerSettings(_Section):
    """The Prefect server that ``up`` starts."""

    host: str = LOCAL_HOST
    """Address of the server and of the Ray node. With another address of this machine than the
    default, other machines can join the stack."""

    port: int = Field(default=4200, ge=0, le=65535)
    """Port of the server and its UI. If another process uses it, the next free one is taken; 0
    takes any free one."""

    password: Literal["generate", "none"] = "generate"
    """Whether the server asks for a password, which is in the file ``server_password`` of the
    stack's home, for this user only. Who reaches a server without one can run code as this user:
    ``none`` is only for a machine of your own, and only with the default host."""

    keep_events: Duration = timedelta(hours=6)
    """Time for which the server keeps events; ``0s`` for none. Runs, tasks, logs and artifacts do
    not need them."""

    keep_runs: Duration = Field(default=timedelta(days=30), gt=timedelta(hours=1))
    """Time for which the server keeps finished flow runs, with their tasks and artifacts."""

    @model_validator(mode="after")
    def _require_password(self) -> "ServerSettings":
        if self.password == "none" and self.host != LOCAL_HOST:
            raise ValueError(
                f'password = "none" lets everyone who reaches {self.host} run code as this user; '
                f'set password = "generate", or host = "{LOCAL_HOST}"'
            )
        return self


class RaySettings(_Section):
    """The Ray cluster in which the stack's tasks run."""

    address: str = ""
    """Address of an existing cluster, as ``host:port``; empty for a Ray node of the stack's own.
    ``RAY_ADDRESS``, which names the training's cluster, is not read."""

    python: str = ""
    """Path of the stack's Python on the nodes of an existing cluster that runs another environment,
    with the same versions of Ray and Python."""

    cpus: int = Field(default=0, ge=0)
    """CPUs of the stack's own Ray node; 0 for all of the machine. Saves request none."""

    object_store_mb: int = Field(default=80, ge=80)
    """Shared memory in MB for the object store of the stack's own Ray node. Saves need almost
    none; no training should join this node."""


class WorkerSettings(_Section):
    """The flow worker, and the tasks of its flows."""

    pool: str = Field(default="trinity-sync", min_length=1)
    """Prefect work pool, of type ``trinity-sync``, of the deployments and of the worker."""

    max_runs: int = Field(default=4, ge=0)
    """Flow runs of a work queue that a worker executes at a time, at most; 0 for no limit."""

    heartbeat_timeout: Duration = Field(default=timedelta(minutes=2), ge=timedelta(seconds=10))
    """Time without a heartbeat (one every 30 s) after which the server marks a flow run as crashed;
    at least ``10s``."""

    metrics: Annotated[str, AfterValidator(require_port)] = Field(
        default="", examples=["127.0.0.1:9464"]
    )
    """Address and port of the worker's Prometheus metrics, such as ``127.0.0.1:9464``; ``0.0.0.0``
    is every address of the node. Empty for none."""

    nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the saver, the server, the worker and Ray's processes: of cores that training
    takes whole, they get a tenth. With 0, both get equal parts; with 19, a commit may take
    minutes, and the training then waits for the memory of the images."""

    allowed_paths: Paths = Field(default=(), examples=[("/data",)])
    """Folders below which flows may use roots and remotes in folders; none for no limit."""


class IoSettings(_Section):
    """Reads and writes of checkpoints."""

    max_mb_per_s: float = Field(default=0.0, ge=0)
    """Speed in MB/s at which a node writes checkpoints, all flow runs and writers of the node
    together; 0 for no limit. Exports and copies from a remote are not counted."""

    reuse_files: bool | Literal["always"] = True
    """Whether large files of removed steps are kept for the next saves to write over, which is
    1.5 times as fast. On a file system that other nodes may see, only ``"always"`` does so."""


class MaintenanceSettings(_Section):
    """The scheduled flows."""

    schedules: bool = True
    """Whether the schedules are active; false deploys them paused. A schedule that was paused or
    moved in the Prefect UI stays so until its settings change."""

    timezone: Annotated[str, AfterValidator(require_time_zone)] = Field(
        default="", examples=["Europe/Berlin"]
    )
    """Time zone of the schedules; empty for that of this host."""

    verify: Share = Field(default=0.02, examples=["2%"])
    """Share of the bytes of all steps that are read each night, next to those of each job's newest
    step, and compared with their digests: with ``2%``, everything is read in 50 nights. ``off`` for
    no reading at all."""

    repair: Duration = Field(default=timedelta(minutes=15), ge=timedelta(minutes=1))
    """Time between two repairs of what crashes have left: runs, images, latest pointers, files."""


class CatalogSettings(_Section):
    """The SQL mirror of committed steps."""

    url: str = Field(default="", examples=["postgresql+psycopg://user@host/database"])
    """SQLAlchemy URL of the database; empty for SQLite in the stack's home."""


class StackSettings(_ReadSettings):
    """The settings of a stack, by sections of ``trinity_sync.toml``."""

    model_config = SettingsConfigDict(
        env_prefix=STACK_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    server: ServerSettings = ServerSettings()
    ray: RaySettings = RaySettings()
    worker: WorkerSettings = WorkerSettings()
    io: IoSettings = IoSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    catalog: CatalogSettings = CatalogSettings()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *_others: Any, **_more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments go before variables, and these before the file."""
        if init_settings.init_kwargs.keys() >= cls.model_fields.keys():
            return (init_settings,)
        file = InitSettingsSource(settings_cls, read_config_file())
        return init_settings, _Environment(settings_cls), file

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        fields: dict[tuple[str, ...], FieldInfo]
        fields = {(section, key): field for section, key, field in iter_stack_fields()}
        return explain(error, STACK_PREFIX, fields, read_config_file(), find_config_file())

    def list_changes(self, before: "StackSettings") -> list[str]:
        """Return each value that differs from that before, as ``server.port: 4200, now 5000``."""
        old = before.model_dump(mode="json")
        return [
            f"{section}.{key}: {show_value(old[section][key])}, now {show_value(value)}"
            for section, values in self.model_dump(mode="json").items()
            for key, value in values.items()
            if value != old[section][key]
        ]

    def to_variables(self) -> dict[str, str]:
        """Return environment variables with all values, for a process that reads no file."""
        variables = {
            stack_variable(section, key): to_text(value)
            for section, values in self.model_dump(mode="json").items()
            for key, value in values.items()
        }
        return variables | {CONFIG: os.devnull}


def read_settings() -> tuple[Settings, StackSettings]:
    """Return the settings of this process, which are read again if its environment has changed.

    Reading them takes a millisecond or more, as long as the other work of a small file.

    Raises:
        ConfigError: A value is invalid.
    """
    return _read(frozenset(os.environ.items()))


@lru_cache(maxsize=2)
def _read(_environment: frozenset[tuple[str, str]]) -> tuple[Settings, StackSettings]:
    return Settings(), StackSettings()


OTHER_VARIABLES = {
    CONFIG,
    "TRINITY_SYNC_ROOT",  # of the job, for veRL's checkpoint engine and DCP's callers
    "TRINITY_SYNC_LOG",
    "TRINITY_SYNC_TRIED",  # of the command itself, see `cli.main`
}
"""Variables that are not settings."""


def list_variables() -> set[str]:
    """Return the names of all variables ``TRINITY_SYNC_...`` that mean something."""
    of_process = {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    of_stack = {stack_variable(section, key) for section, key, _ in iter_stack_fields()}
    return of_process | of_stack | OTHER_VARIABLES


def stack_variable(section: str, key: str) -> str:
    """Return the environment variable of a stack setting."""
    return f"{STACK_PREFIX}{section}__{key}".upper()


def iter_stack_fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield section, key and field of each stack setting."""
    for section, field in StackSettings.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        for key, each in field.annotation.model_fields.items():
            yield section, key, each
