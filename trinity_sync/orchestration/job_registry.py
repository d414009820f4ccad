"""Registry of the jobs that scheduled flows maintain, and commands list.

They are all jobs that have committed a step on this node: a saver or the commit task registers each
root, as a small file in ``TRINITY_SYNC_HOME/roots``.
"""

from functools import partial
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.root_threads import RootVisits
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import list_registered_roots

ANSWER_S = 10.0
"""Seconds in which a root answers, unless its file system hangs."""

_visits = RootVisits("is it there")


def list_known_roots(settings: Settings, stack: StackSettings) -> list[Path]:
    """Return the roots of the jobs to maintain, sorted by name.

    Roots that do not exist or do not answer, and registered roots that ``worker.allowed_paths`` no
    longer covers, are left out.
    """
    known = partial(_is_known, stack)
    found = _visits.visit(list_registered_roots(settings.home), known, limit_s=ANSWER_S)
    return [root for root, is_known in found.items() if is_known]


def _is_known(stack: StackSettings, root: Path) -> bool:
    try:
        return is_allowed(stack, root) and root.is_dir()
    except OSError:  # such as of a mount whose server is gone
        return False


def select_roots(root: str | None, settings: Settings, stack: StackSettings) -> list[Path]:
    """Return the given root, a full path, or for None those of all known jobs.

    Raises:
        ConfigError: The root is not the full path of a folder, or is not allowed.
    """
    if root is None:
        return list_known_roots(settings, stack)
    require_allowed(root, stack)
    if not Path(root).is_absolute() or not Path(root).is_dir():
        raise ConfigError(
            f"root {root!r} is not the full path of a folder on this node; pass the job's root, or "
            "none for all known jobs"
        )
    return [Path(root).resolve()]


def require_allowed(path: str | Path, stack: StackSettings) -> None:
    """Refuse a path, passed as a flow parameter, that flows may not use on this node.

    Raises:
        ConfigError: The path is not below one of ``worker.allowed_paths``.
    """
    if not is_allowed(stack, path):
        allowed = ", ".join(map(str, stack.worker.allowed_paths))
        raise ConfigError(
            f"{path} is not below a folder that flows may use on this node: worker.allowed_paths "
            f"names {allowed}. Choose a path below one of these, or add it there."
        )


def require_allowed_store(url: str, stack: StackSettings) -> None:
    """Refuse a remote that is a folder of this node which flows may not use.

    The folder that the URL resolves to decides, not its spelling.

    Raises:
        ConfigError: The remote is, or may be, a folder that is not allowed; or the URL is invalid.
    """
    if not stack.worker.allowed_paths:
        return
    from trinity_sync.remote.remote_root import (  # slow to import
        ELSEWHERE,
        LOCAL,
        Remote,
        parse_protocol,
    )

    protocol = parse_protocol(url)
    folder = Remote(url).folder if protocol in LOCAL else None
    if folder is not None:
        require_allowed(folder, stack)
    elif protocol not in ELSEWHERE:
        raise ConfigError(
            f"{url} may resolve to a folder of this node that worker.allowed_paths does not name. "
            f"Use a remote of {', '.join(sorted(ELSEWHERE))}, or file:// with a path below one of "
            "the allowed folders."
        )


def is_allowed(stack: StackSettings, path: str | Path) -> bool:
    """Return whether flows may use a path on this node.

    Its file system, which may hang, is asked for the real path.
    """
    real = Path(path).resolve()
    allowed = stack.worker.allowed_paths
    return not allowed or any(real.is_relative_to(each.resolve()) for each in allowed)
