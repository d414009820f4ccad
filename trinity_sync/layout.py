"""Names and paths of a job's files: the layout that veRL and Trinity read.

::

    root/                                         Trinity's checkpoint_job_dir
      latest_checkpointed_iteration.txt
      latest_state_dict_iteration.txt
      global_step_40/
        manifest.json
        .full_checkpoint
        corrupted.json                          only where a verification found corruption
        actor/
          model_world_size_2_rank_0.pt            optim_..., extra_state_... likewise
          fsdp_config.json
          huggingface/config.json ...
        critic/...
        attachments/dataloader.json           what rank 0 attached
        attachments/rank_1/...                what the others did
      .trinity_sync/runs/3.json                   one small file a run of the job
"""

import hashlib
import operator
import os
import re
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from trinity_sync.errors import ConfigError

Kind = Literal["checkpoint", "state_dict"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVES_AS: dict[Kind, tuple[Kind, ...]] = {
    "checkpoint": ("checkpoint", "state_dict"),
    "state_dict": ("state_dict",),
}
"""What a commit of a kind is good for: a checkpoint holds the weights too, and so serves syncs."""

SaveStrategy = Literal["unrestricted", "single_node", "single_process", "single_thread"]
"""How many shards of a job are written at once, in Trinity's words."""

Component = Literal["model", "optim", "extra_state", "metadata", "attachments"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
FOLDERS: tuple[Component, ...] = ("metadata", "attachments")
"""Those that are small files in a folder and not one shard a rank."""

MANIFEST = "manifest.json"
FULL_CHECKPOINT_MARK = ".full_checkpoint"
CORRUPTION_MARK = "corrupted.json"
PRIVATE_FOLDER = ".trinity_sync"
ITERATION_FILES: dict[Kind, str] = {
    "checkpoint": "latest_checkpointed_iteration.txt",
    "state_dict": "latest_state_dict_iteration.txt",
}

SPOOL_FORMAT = 1
"""Format of the records in a node's spool, and of `SaveRequest`: what is of a save in flight."""
ROOT_FORMAT = 1
"""Format of the records in a job's root, which may be read years later. See "Formats" in
``docs/architecture.md`` for what needs a new number, and who refuses what."""

_STEP_FOLDER = "global_step_"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")


_READABLE = 100
"""Characters of a folder's name that a job's has: file names of at most 255 are made of it."""


def refuse_url(root: str | Path) -> None:
    """See that a root is no URL, also if it went through a path, which makes ``s3:/`` of it.

    Raises:
        ConfigError: it is one, and the message says how to have steps in a store; or its name is
            not text.
    """
    if not _is_utf8(Path(root).absolute()) or not is_path(str(root)):
        raise ConfigError(
            f"root {str(root)!r} holds a NUL or bytes that are not valid UTF-8, and Prefect and "
            "the catalog could not be told of it; rename the folder"
        )
    if url := _URL.fullmatch(str(root)):
        raise ConfigError(
            f"{root} is a URL, and the root of a job is a folder: steps are written, renamed and "
            "locked there, which no object store can do. Pass a folder, and for steps that count "
            f"once they are in a store set TRINITY_SYNC_REMOTE={url[1]}://{url[2]} (docs/roots.md)"
        )


def step_folder(root: str | Path, step: int) -> Path:
    """``root/global_step_{step}``."""
    return Path(root) / f"global_step_{step}"


def is_step_folder(path: str | Path) -> bool:
    """Whether a path ends with ``global_step_{N}``."""
    return step_of_folder(Path(path).name) is not None


def step_of_folder(name: str) -> int | None:
    """Return N of ``global_step_{N}``, as `step_folder` writes it; None for any other name."""
    return parse_number(name[len(_STEP_FOLDER) :]) if name.startswith(_STEP_FOLDER) else None


def parse_number(text: str) -> int | None:
    """Return the number that ``str`` writes so, of at most 18 digits; None for any other text.

    ``007`` and digits of other scripts are no second way to write a step.
    """
    return int(text) if _NUMBER.fullmatch(text) else None


def shard_file(component: str, world_size: int, rank: int) -> str:
    """File name of one rank's shard, as veRL's checkpoint manager and merger expect it."""
    return f"{component}_world_size_{world_size}_rank_{rank}.pt"


def steps_on_disk(root: str | Path) -> list[int]:
    """Steps that have a folder under ``root``, or a link to one, committed or not, by number."""
    base = Path(root)
    if not base.is_dir():
        return []
    with os.scandir(base) as entries:
        found = {step_of_folder(entry.name): entry for entry in entries}
    return sorted(
        step
        for step, entry in found.items()
        if step is not None and (Path(entry) if entry.is_symlink() else entry).is_dir()
    )


def split_role_path(local_path: str | Path) -> tuple[Path, int, str]:
    """Take ``root/global_step_{N}/{role}`` apart into (root, N, role).

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
    """Whether the operating system can be given a text as a path."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_below(path: str) -> bool:
    """Whether a name, as a manifest has them, stays below the step's folder."""
    pure = PurePosixPath(path)
    return is_path(path) and bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def check_number(what: str, value: object) -> int:
    """Return ``value`` as an ``int``, whichever integral type it has: ``np.int64``, a 0-d tensor.

    Raises:
        ConfigError: it is a bool, a float or no number at all, negative, or of more than 18 digits.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
    try:
        number = -1 if is_bool else int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if not 0 <= number < 10**18:
        raise ConfigError(f"{what} {value!r} is no whole number from 0 to 10^18; pass an int")
    return number


def check_name(what: str, value: str) -> str:
    """Return ``value`` if it can be part of a file name (letters, digits, ``_`` and ``-``).

    Raises:
        ConfigError: it cannot; the message says what ``what`` may contain.
    """
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{what} {value!r} may hold letters, digits, '_' and '-' only")
    return value


def job_id(root: str | Path) -> str:
    """A name for the job at ``root``, unique on a machine: folder name and a digest of its path."""
    real = Path(root).resolve()
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", real.name)[:_READABLE].strip("-") or "job"
    return f"{readable}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
