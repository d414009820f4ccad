"""Settings of a process, read from the environment, and of a stack, read from a file.

`Settings` are those of any process: trainer ranks, rollout workers, the flow worker and Ray tasks.
Each reads its own environment. Values that have to agree between them (paths, run, step) are in
tickets and in the flow's parameters.

`StackSettings` are those of a stack's processes, in the file ``trinity_sync.toml``. It is the one
that ``TRINITY_SYNC_CONFIG`` names, otherwise ``~/.config/trinity_sync/trinity_sync.toml``,
otherwise ``/etc/trinity_sync/trinity_sync.toml``. Neither the working folder nor a project is
searched: a stack outlives both. A variable such as ``TRINITY_SYNC_STACK__SERVER__PORT`` goes before
the file.
"""

import difflib
import json
import os
import re
import socket
import sys
import zoneinfo
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from trinity_sync.errors import ConfigError
from trinity_sync.fs.mounts import find_mount
from trinity_sync.retention.policies import format_duration, parse_duration

CONFIG_FILE = "trinity_sync.toml"
CONFIG = "TRINITY_SYNC_CONFIG"
"""Environment variable with the path of the stack's file; ``/dev/null`` for none."""
PREFIX = "TRINITY_SYNC_"
STACK_PREFIX = "TRINITY_SYNC_STACK__"
LOCAL_HOST = "127.0.0.1"
"""Host of a stack that no other machine can join."""


def _to_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        raise ValueError("must be a number with a unit: s, m, h or d")
    return timedelta(seconds=seconds)


def _to_share(value: Any) -> Any:
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", value) if isinstance(value, str) else None
    if value != "off" and (not found or not 0 < float(found[1]) <= 100):
        raise ValueError("must be a percentage above 0% and up to 100%, or off")
    return float(found[1]) / 100 if found else 0.0


def _to_paths(value: Any) -> Any:
    return [path for path in value.split(os.pathsep) if path] if isinstance(value, str) else value


def _to_names(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _require_time_zone(name: str) -> str:
    try:
        if name:
            zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError("must be the name of a time zone") from None
    return name


def _require_cron(text: str) -> str:
    if text != "off" and len(text.split()) != 5:
        raise ValueError("must be the five fields of a cron expression, or off")
    return text


def _require_port(address: str) -> str:
    if address and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise ValueError("must be an address and a port")
    return address


Duration = Annotated[
    timedelta,
    BeforeValidator(_to_duration),
    PlainSerializer(lambda value: format_duration(value.total_seconds()), str, "json"),
]
"""A duration, as text in files and variables: ``90s``, ``2m``, ``6h``, ``30d``."""
Share = Annotated[
    float,
    BeforeValidator(_to_share),
    PlainSerializer(lambda value: f"{100 * value:g}%" if value else "off", str, "json"),
]
"""A share of 1, as text in files and variables: ``2%``; ``off`` for 0."""
Paths = Annotated[
    tuple[Path, ...],
    BeforeValidator(_to_paths),
    PlainSerializer(lambda value: os.pathsep.join(map(str, value)), str, "json"),
]
"""Folders: a list in files, separated by ``:`` in variables."""
Names = Annotated[
    tuple[str, ...], BeforeValidator(_to_names), PlainSerializer(",".join, str, "json")
]
"""Names, with commas between them in variables."""


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
        _refuse_unknown_variables()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None


def _default_spool() -> Path:
    return Path(f"/dev/shm/trinity_sync-{os.getuid()}")


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

    spool: Path = Field(default_factory=_default_spool)
    """Folder in shared memory for the slots and tickets of this node."""

    node: str = Field(default_factory=socket.gethostname, pattern=r"^[^/\s]+$")
    """Name of this node in Ray: the host name, or the value of ``ray start --node-name``."""

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
    """Key of the training's run: the same in all of its processes, and new at each start. By
    default the launcher's, or a random one."""

    trusted_paths: Paths = Field(default=(), examples=[("/data",)])
    """Folders whose files are unpickled in full, although others than this user can write them;
    separated by ``:``. Files of this user are always trusted."""

    home: Path = Field(default_factory=default_home)
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

    metrics: Annotated[str, AfterValidator(_require_port)] = Field(
        default="", examples=["127.0.0.1:9464"]
    )
    """Address and port of the worker's Prometheus metrics, such as ``127.0.0.1:9464``; ``0.0.0.0``
    is every address of the node. Empty for none."""

    nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the server, the worker and the threads that write and read files."""

    allowed_paths: Paths = Field(default=(), examples=[("/data",)])
    """Folders below which flows may use roots, exports and remotes in folders; none for no limit.
    """


class IoSettings(_Section):
    """Reads and writes of checkpoints."""

    max_mb_per_s: float = Field(default=0.0, ge=0)
    """Speed in MB/s at which a node writes checkpoints, all flow runs and writers of the node
    together; 0 for no limit. Exports and copies from a remote are not counted."""

    reuse_files: bool | Literal["always"] = True
    """Whether large files of removed steps are kept for the next saves to write over, which is
    about twice as fast. On a file system that other nodes may see, only ``"always"`` does so."""


class MaintenanceSettings(_Section):
    """The scheduled flows."""

    schedules: bool = True
    """Whether the schedules are active; false deploys them paused. A schedule that was paused or
    moved in the Prefect UI stays so until its settings change."""

    timezone: Annotated[str, AfterValidator(_require_time_zone)] = Field(
        default="", examples=["Europe/Berlin"]
    )
    """Time zone of the schedules; empty for that of this host."""

    verify: Share = Field(default=0.02, examples=["2%"])
    """Share of the bytes of all steps that are read each night, next to those of each job's newest
    step, and compared with their digests: with ``2%``, everything is read in 50 nights. ``off`` for
    no reading at all."""

    load_test: Annotated[str, AfterValidator(_require_cron)] = Field(
        default="off", examples=["43 4 * * 0"]
    )
    """When the newest checkpoint of each job is loaded whole, as a restart would, as a cron
    expression; ``off`` for never."""

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


OTHER_VARIABLES = {
    CONFIG,
    "TRINITY_SYNC_ROOT",  # of the job that commands are about
    "TRINITY_SYNC_LOG",
    "TRINITY_SYNC_TRIED",  # of the command itself, see `cli.main`
}
"""Variables that are not settings."""


def list_variables() -> set[str]:
    """Return the names of all variables ``TRINITY_SYNC_...`` that mean something."""
    of_process = {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    of_stack = {stack_variable(section, key) for section, key, _ in iter_stack_fields()}
    return of_process | of_stack | OTHER_VARIABLES


def _refuse_unknown_variables() -> None:
    """Refuse a variable that would be ignored in silence.

    Raises:
        ConfigError: The environment has variables of ours that mean nothing.
    """
    known = list_variables()
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(PREFIX) and name not in known and not _is_of_kubernetes(name)
    )
    if unknown:
        raise ConfigError(
            "\n".join(f"the variable {name} is unknown; {suggest(name, known)}" for name in unknown)
        )


def _is_of_kubernetes(name: str) -> bool:
    """Return whether Kubernetes sets a variable in all pods, for a service ``trinity-sync...``."""
    if re.fullmatch(r".*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)", name):
        return True
    return name.endswith("_PORT") and bool(re.match("(tcp|udp|sctp)://", os.environ[name]))


def to_text(value: Any) -> str:
    """Return a value in the form of a variable."""
    if isinstance(value, tuple):
        return os.pathsep.join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def show_value(value: Any) -> str:
    """Return `to_text` of a value without the password of a URL."""
    return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", to_text(value))


def stack_variable(section: str, key: str) -> str:
    """Return the environment variable of a stack setting."""
    return f"{STACK_PREFIX}{section}__{key}".upper()


def iter_stack_fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield section, key and field of each stack setting."""
    for section, field in StackSettings.model_fields.items():
        for key, each in _section_fields(field).items():
            yield section, key, each


def _section_fields(field: FieldInfo) -> dict[str, FieldInfo]:
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, BaseModel)
    return field.annotation.model_fields


def find_config_file() -> Path | None:
    """Return the path of the stack's file; None if there is none.

    Raises:
        ConfigError: ``TRINITY_SYNC_CONFIG`` names a file that does not exist.
    """
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


def read_config_file() -> dict[str, Any]:
    """Return the content of the stack's file, which is not validated; empty without one.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    path = find_config_file()
    if path is None:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # of the stack extra: a client reads no file
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest one, or all that are known.

    Args:
        name: The unknown name.
        known: The known names.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def _explain(error: ValidationError, model: type[BaseSettings]) -> str:
    """Return a sentence for each wrong value, which says where it is and shows a valid one."""
    stack = issubclass(model, StackSettings)
    whys: dict[tuple[str, ...], list[str]] = {}
    inputs: dict[tuple[str, ...], Any] = {}
    for each in error.errors():
        name = tuple(map(str, each["loc"][: 1 + stack]))
        why = each["msg"].removeprefix("Value error, ")
        whys.setdefault(name, []).append(why[:1].lower() + why[1:])
        inputs[name] = each["input"]
    explain = _explain_stack_value if stack else _explain_value
    return "\n".join(explain(name, inputs[name], " or ".join(whys[name])) for name in whys)


def _explain_value(name: tuple[str, ...], value: Any, why: str) -> str:
    variable = f"{PREFIX}{name[0]}".upper()
    field = Settings.model_fields.get(name[0])
    if field is None:
        return f"{name[0]} is no setting; {suggest(name[0], Settings.model_fields)}"
    where = variable if os.environ.get(variable) else name[0]
    return f"{where}={value}: {why}{_example(where, field)}"


def _explain_stack_value(name: tuple[str, ...], value: Any, why: str) -> str:
    sections = StackSettings.model_fields
    file = find_config_file()
    in_file = read_config_file()
    variable = stack_variable(name[0], name[-1])
    section = sections.get(name[0])
    if section is None:
        what = f"unknown section [{name[0]}]; {suggest(name[0], sections)}"
    elif len(name) == 1:
        what = f"[{name[0]}]: {why}"
    else:
        fields = _section_fields(section)
        field = fields.get(name[1])
        if field is None:
            what = f"unknown key {name[1]} in [{name[0]}]; {suggest(name[1], fields)}"
        elif os.environ.get(variable):
            return f"{variable}={value}: {why}{_example(variable, field)}"
        else:
            what = f"{name[1]} = {value!r} in [{name[0]}]: {why}"
            what += _example(f"{name[1]} ", field, quote=True)
    return f"{file}: {what}" if name[0] in in_file else what


def _example(name: str, field: FieldInfo, *, quote: bool = False) -> str:
    """Return the end of a sentence with a valid value; empty if none can be shown."""
    if field.default_factory is not None:
        return ""
    value = (field.examples or [field.default])[0]
    if isinstance(value, timedelta):
        value = format_duration(value.total_seconds())
    text = json.dumps(value) if quote else to_text(value)
    return f"; e.g. {name}={' ' * quote}{text}"
