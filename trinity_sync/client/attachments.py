"""Files that are committed with a step: the position of a dataloader, an explorer's state.

They stay in memory until a later step is saved, and are staged with their step's states: they are
committed with the step or not at all, also if the trainer dies. A save that failed and is called
again takes them along. Folders are read into the image by the save. Files that other code has
written for the step stay where they are until the commit moves them.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trinity_sync.client.state_saver import StateSaver
from trinity_sync.errors import ConfigError
from trinity_sync.layout import EMPTY_FOLDER, attaching_folder, check_type, step_folder
from trinity_sync.snapshot.packed import Packed, list_files, pack, require_names
from trinity_sync.snapshot.stager import ATTACHMENTS
from trinity_sync.storage.manifest import is_own_file

LIMIT = 256 << 20
"""Most bytes of an attachment, which is copied as a whole on the training thread."""

_NAME = re.compile(r"(?!rank_\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""A name that leaves room for that of a temporary file."""


class Attachments:
    """The attachments of one rank, which go with its ``states``."""

    def __init__(self, root: Path, rank: int, states: StateSaver) -> None:
        self._root = root
        self._rank = rank
        self._defer_errors = states.defer_errors
        self._pending: dict[int, dict[str, bytes | Path]] = {}
        self._links: dict[int, dict[str, Path]] = {}
        """Files on the disk, by step and by their names in the step's folder."""
        self._newest_taken = -1
        self._roles: dict[int, str] = {}
        """By step, the role that takes its attachments."""

    def add(self, step: int, name: str, content: str | Path | bytes) -> None:
        """Keep a copy of a file, given as bytes or its path, for a step that is not saved yet.

        Raises:
            ConfigError: the name or the path is invalid, the content is larger than `LIMIT`, or the
                step was submitted already.
        """
        path = attachment_path(name, self._rank)
        check_type(name, content, str | Path | bytes | bytearray, "bytes, or the path of a file")
        _refuse_own_names([path])
        self._require_before_save(step, name)
        with self._defer_errors(step, "checkpoint", name):
            try:
                whole = Path(content).read_bytes() if isinstance(content, str | Path) else content
            except (OSError, ValueError) as error:  # a path with a NUL
                raise ConfigError(
                    f"step {step}: {str(content)!r} cannot be attached as {path}: "
                    f"{getattr(error, 'strerror', error)}; pass bytes, or the path of a file"
                ) from error
            if len(whole) > LIMIT:
                raise ConfigError(
                    f"step {step}: {name!r} of {len(whole):,} bytes cannot be attached as {path}: "
                    f"an attachment has at most {LIMIT:,} bytes; save its tensors as a component, "
                    "such as extra_state, or attach its folder with attach_folder"
                )
            self._replace(step, name, {name: bytes(whole)})

    def add_folder(self, step: int, name: str, folder: Path) -> None:
        """Attach the files below a folder, which the save of the step reads.

        Raises:
            ConfigError: the name is invalid, the step was submitted already, or as `list_folder`.
        """
        attachment_path(name, self._rank)  # refuses an invalid name
        self._require_before_save(step, name)
        with self._defer_errors(step, "checkpoint", name):
            self._replace(step, name, list_folder(step, name, folder))

    def add_written(self, step: int, folder: Path) -> None:
        """Attach the files below a folder, which the commit moves to the step's folder.

        Raises:
            ConfigError: the folder is elsewhere, or the step was submitted already.
        """
        self._require_before_save(step, str(folder))
        if folder.parent.parent != (attaching := attaching_folder(self._root)):
            raise ConfigError(
                f"step {step}: the files in {folder} cannot be attached, since a commit moves them "
                f"from {attaching} only; write them to {attaching}/NAME/{step_folder('', step)}"
            )
        with self._defer_errors(step, "checkpoint", str(folder)):
            self._links[step] = list_files(folder) if folder.exists() else {}

    def take(self, step: int, role: str) -> Packed | None:
        """Return all attachments of a step, packed; afterwards the step accepts no more.

        None if the step has none, or if another role of the step has taken them before. Those of
        earlier steps are deleted.

        Raises:
            OSError: a file of a folder cannot be looked at.
        """
        for by_step in (self._pending, self._links, self._roles):
            for other in sorted(by_step):
                if other < step:
                    del by_step[other]
        mine, links = self._pending.get(step, {}), self._links.get(step, {})
        taken = (mine or links) and self._roles.setdefault(step, role) == role
        packed = pack(mine, links) if taken else None
        self._newest_taken = max(step, self._newest_taken)
        return packed

    def _replace(self, step: int, name: str, files: Mapping[str, bytes | Path]) -> None:
        before = self._pending.get(step, {})
        kept = {n: each for n, each in before.items() if not f"{n}/".startswith(f"{name}/")}
        self._pending[step] = {**kept, **files}

    def _require_before_save(self, step: int, name: str) -> None:
        if step <= self._newest_taken:
            raise ConfigError(
                f"step {step}: {name!r} can no longer be attached, since step "
                f"{self._newest_taken} was submitted or is in flight; attach before the save"
            )


def list_folder(step: int, name: str, folder: Path) -> dict[str, bytes | Path]:
    """Return the files below a folder that is saved under a name, by their paths there.

    Those of a folder without any are a mark that it is empty.

    Raises:
        ConfigError: the folder is none, a name is one that trinity_sync uses itself, or otherwise
            as `list_files` and `require_names`.
    """
    if not folder.is_dir():
        raise ConfigError(f"step {step}: {folder} cannot be saved as {name!r}: it is no folder")
    files: Mapping[str, bytes | Path] = list_files(folder) or {EMPTY_FOLDER: b""}
    found = {f"{name}/{each}": content for each, content in files.items()}
    require_names(found)
    _refuse_own_names(found)
    return found


def _refuse_own_names(paths: Iterable[str]) -> None:
    for path in paths:
        if is_own_file(path):
            raise ConfigError(
                f"{path!r} cannot be saved: it is a name that trinity_sync uses itself; save that "
                "file under another name"
            )


def attachment_path(name: str, rank: int) -> str:
    """Return the path of what a rank attaches, below the step's folder.

    Raises:
        ConfigError: the name is invalid.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(
            f"attachment {name!r}: a name holds at most 200 letters, digits, '.', '_' and '-', "
            "begins with a letter or digit, and is not rank_<number>"
        )
    return f"{ATTACHMENTS}/rank_{rank}/{name}" if rank else f"{ATTACHMENTS}/{name}"
