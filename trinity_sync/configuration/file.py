"""The stack's file ``trinity_sync.toml``: which one counts, and its content."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError

CONFIG_FILE = "trinity_sync.toml"
CONFIG = "TRINITY_SYNC_CONFIG"
"""Environment variable with the path of the stack's file; ``/dev/null`` for none."""


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
