"""Names and paths of a job's files, in the layout that veRL and Trinity read.

::

    root/                               Trinity's checkpoint_job_dir
      latest_checkpointed_iteration.txt
      latest_state_dict_iteration.txt
      global_step_40/
        manifest.json
        manifest-0123456789abcdef.json  of thousands of files: its parts
        .full_checkpoint
        corrupted.json                  only if a verification found corruption
        actor/
          model_world_size_2_rank_0.pt  optim_..., extra_state_... likewise
          __0_0.distcp                  what dcp.async_save wrote, with .metadata
          dcp_folder                    where a caller of DCP finds these files
          model/dist_ckpt/__0_0.distcp  Megatron's, with common.pt; optimizer/, extra/
          fsdp_config.json
          huggingface/config.json ...
        critic/...
        attachments/dataloader.json     what rank 0 attached
        attachments/rank_1/...          what other ranks attached
        data.pt ...                     what veRL's own code writes for the step
      .trinity_sync/identity.json       distinguishes the job from others at this path
      .trinity_sync/runs/3.json         one small file for each run of the job
"""

import hashlib
import math
import numbers
import operator
import os
import re
import reprlib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from trinity_sync.errors import ConfigError

Kind = Literal["checkpoint", "state_dict"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVES_AS: dict[Kind, tuple[Kind, ...]] = {
    "checkpoint": ("checkpoint", "state_dict"),
    "state_dict": ("state_dict",),
}
"""Kinds that a commit serves as: a checkpoint includes the weights, so it serves as a sync."""

WriteConcurrency = Literal["all", "per_node", "per_rank", "one"]
"""Shards of a job that are written at once."""

Component = Literal["model", "optim", "extra_state", "dcp", "metadata", "attachments"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
FOLDERS: tuple[Component, ...] = ("metadata", "attachments")
"""Components that are folders of small files instead of a shard for each rank."""

MANIFEST = "manifest.json"
FULL_CHECKPOINT_MARK = ".full_checkpoint"
CORRUPTION_MARK = "corrupted.json"
PRIVATE_FOLDER = ".trinity_sync"
EMPTY_FOLDER = ".empty_folder"
"""File in a folder that was attached without files; a commit has files only."""
ITERATION_FILES: dict[Kind, str] = {
    "checkpoint": "latest_checkpointed_iteration.txt",
    "state_dict": "latest_state_dict_iteration.txt",
}

SPOOL_FORMAT = 1
"""Format of a job's folder in a spool, and of `SaveRequest`. "Formats" in
``docs/reference/files.md`` says which changes need a new number, here and below."""
ROOT_FORMAT = 1
"""Format of all records in a job's root but the manifests and runs."""
MANIFEST_FORMAT = 1
"""Format of manifests, which remotes hold as well, and which may be read years later."""
RUN_FORMAT = 1
"""Format of the records of runs, for the same reason."""

_STEP_FOLDER = "global_step_"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_BELOW = re.compile(
    r"(?!/)(?!(?:.*/)?\.\.(?:/|\Z))(?!\.?(?:/\.?)*\Z)[^\0\ud800-\udc7f\udd00-\udfff]+", re.DOTALL
)
"""A relative path without ``..`` that names something and that `is_path`. One expression, since a
manifest names thousands of paths."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
_READABLE = 100
"""Characters of the job's name in its identifier: file names of at most 255 contain it."""
_COMMON_NAMES = {"ckpt", "ckpts", "checkpoint", "checkpoints"}
"""Names of folders that name no job without their parent."""


def refuse_url(root: str | Path) -> None:
    """Require that a root is a path and not a URL, also after `Path` has made ``s3:/`` of it.

    Raises:
        ConfigError: it is a URL, and the message names the setting for a remote; or the path is
            empty or not valid text.
    """
    check_type("root", root, str | Path, "a folder")
    if not str(root):
        raise ConfigError("the root is empty, as is a variable without a value; pass a folder")
    full = str(Path(root).absolute())
    if full.encode(errors="ignore").decode() != full or not is_path(str(root)):
        raise ConfigError(
            f"root {str(root)!r} has a NUL or bytes that are not valid UTF-8, which records and "
            "messages do not support; rename the folder"
        )
    if url := _URL.fullmatch(str(root)):
        raise ConfigError(
            f"{root} is a URL, but the root of a job has to be a folder: files are renamed and "
            "locked there, which object stores cannot do. Pass a folder, and for copies in a store "
            f"set its remote: trinity-sync jobs set ROOT remote={url[1]}://{url[2]}"
        )


def check_root(root: str | Path) -> None:
    """Require that a path can be that of a root that is written, which may not exist.

    Raises:
        ConfigError: as `refuse_url`, or it is the folder of a step or in one, and no root.
    """
    refuse_url(root)
    if os.path.isdir(Path(root) / PRIVATE_FOLDER):  # noqa: PTH112, False for a folder without access
        return
    for path in (Path(os.path.abspath(root)), Path(os.path.realpath(root))):  # noqa: PTH100
        for each in filter(is_step_folder, (path, *path.parents)):
            found = each.parent / PRIVATE_FOLDER, each / MANIFEST
            if any(map(os.path.exists, found)):
                raise ConfigError(
                    f"{root} is not the root of a job, but inside of one; pass the root: "
                    f"{each.parent}"
                )


def step_folder(root: str | Path, step: int) -> Path:
    """Return the path ``root/global_step_{step}``."""
    return Path(root) / f"global_step_{step}"


def attaching_folder(root: str | Path) -> Path:
    """Return the folder with a folder of a random name for each save that other code writes for.

    Its files are passed to `CheckpointCoordinator.attach_written`; the commit moves them.
    """
    return Path(root) / PRIVATE_FOLDER / "attaching"


def is_step_folder(path: str | Path) -> bool:
    """Return whether a path ends with ``global_step_{N}``."""
    return step_of_folder(Path(path).name) is not None


def step_of_folder(name: str) -> int | None:
    """Return N of ``global_step_{N}``, as `step_folder` writes it; None for any other name."""
    return parse_number(name[len(_STEP_FOLDER) :]) if name.startswith(_STEP_FOLDER) else None


def parse_number(text: str) -> int | None:
    """Return the number in a text of at most 18 digits; None for any other text.

    The text has to be that of ``str(number)``: ``007`` and digits of other scripts return None.
    """
    return int(text) if _NUMBER.fullmatch(text) else None


def shard_file(component: str, world_size: int, rank: int) -> str:
    """Return the file name of a rank's shard that veRL's checkpoint manager and merger expect."""
    return f"{component}_world_size_{world_size}_rank_{rank}.pt"


def is_shard_file(path: str) -> bool:
    """Return whether a path below a role's folder is one that `shard_file` may return."""
    return re.fullmatch(r"[^/]+_world_size_\d+_rank_\d+\.pt", path) is not None


def steps_on_disk(root: str | Path) -> list[int]:
    """Return the steps with a folder (or a link to one) in a root, committed or not, in order."""
    try:
        with os.scandir(root) as entries:
            found = {step_of_folder(entry.name): entry for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        step
        for step, entry in found.items()
        if step is not None and (Path(entry) if entry.is_symlink() else entry).is_dir()
    )


def split_role_path(local_path: str | Path) -> tuple[Path, int, str]:
    """Split ``root/global_step_{N}/{role}`` into (root, N, role).

    Raises:
        ConfigError: the path does not have this form.
    """
    refuse_url(local_path)
    path = Path(local_path).absolute()
    step = step_of_folder(path.parent.name)
    if step is None or not _NAME.fullmatch(path.name):
        raise ConfigError(
            f"checkpoint path {str(local_path)!r} is not of the form "
            "<root>/global_step_<N>/<role>; pass such a path, e.g. ckpts/global_step_40/actor"
        )
    return path.parent.parent, step, path.name


def is_path(text: str) -> bool:
    """Return whether the operating system accepts a text as a path."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_below(path: str) -> bool:
    """Return whether a path in a manifest stays below the step's folder."""
    return bool(_BELOW.fullmatch(path))


def check_number(what: str, value: object) -> int:
    """Return a value of any integral type (``np.int64``, a 0-d tensor) as an ``int``.

    Raises:
        ConfigError: the value is a bool, a float or not a number, is negative, or has more than 18
            digits.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
    try:
        number = -1 if is_bool else int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if not 0 <= number < 10**18:
        given = reprlib.repr(value)  # a state that was passed in its place is long
        raise ConfigError(f"{what} {given} is not a whole number from 0 to 10^18; pass an int")
    return number


def check_seconds(what: str, value: object) -> float:
    """Return a number of seconds, or raise `ConfigError`."""
    if not isinstance(value, numbers.Real) or math.isnan(value):
        raise ConfigError(f"{what} {reprlib.repr(value)} is no number of seconds; pass a float")
    return float(value)


def check_type(what: str, value: object, kind: Any, wanted: str) -> None:
    """Raise `ConfigError`, with what is wanted, unless a value is of a type or union of types.

    A text is no `Collection`.
    """
    if not isinstance(value, kind) or (kind is Collection and isinstance(value, str)):
        raise ConfigError(f"{what} may not be {reprlib.repr(value)}; pass {wanted}")


def check_name(what: str, value: str) -> str:
    """Return a value that can be part of a file name (letters, digits, ``_`` and ``-``).

    Raises:
        ConfigError: the value has other or more than 100 characters, or begins with ``_`` or
            ``-``; or it is a role with the folder of the attachments.
    """
    if (what, value) == ("role", "attachments"):
        raise ConfigError("role 'attachments' has the folder of what is attached; rename the role")
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise ConfigError(
            f"{what} {value!r} may hold letters, digits, '_' and '-' only, 100 at most"
        )
    return value


def check_choice(what: str, value: object, known: Collection[str]) -> None:
    """Require that a value is one of those that are known.

    Raises:
        ConfigError: it is none of them.
    """
    if not (isinstance(value, str) and value in known):
        raise ConfigError(f"{what} {value!r} is unknown; pass one of {', '.join(map(repr, known))}")


def name_job(real: Path) -> str:
    """Return the name of a job, given the full path of its root: its folder's.

    A folder with a common name has its parent.
    """
    return "/".join(real.parts[1:][-1 - (real.name.lower() in _COMMON_NAMES) :])


@lru_cache(maxsize=64)  # each save asks for the same
def job_id_of(real: Path, identity: str = "") -> str:
    """Return the identifier of a job; it asks no file system.

    ``real`` is the root's full path, without symbolic links. Without an identity, the identifier is
    that of the path alone.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name_job(real))[-_READABLE:].strip("-") or "job"
    digest = hashlib.sha256(b"\0".join([os.fsencode(real), identity.encode()]))
    return f"{readable}-{digest.hexdigest()[:8]}"
