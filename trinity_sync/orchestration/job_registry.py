"""Which jobs the flows look after that nobody names one to: those of the nightly schedules.

``TRINITY_SYNC_MAINTAIN`` names them. Without it they are all jobs that have committed something on
this node: the commit task notes each root once, as a small file in ``TRINITY_SYNC_HOME/roots``.
"""

import json
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import make_folder
from trinity_sync.fs.create import create_file
from trinity_sync.layout import job_id
from trinity_sync.settings import Settings


def register_job(settings: Settings, root: str | Path) -> None:
    """Remember the root of a job that has committed something; again is harmless and costs a stat.

    Raises:
        OSError: ``TRINITY_SYNC_HOME`` cannot be written.
    """
    note = _folder(settings) / f"{job_id(root)}.json"
    if not note.exists():
        make_folder(note.parent)
        create_file(note, json.dumps({"root": str(Path(root).resolve())}))


def list_known_roots(settings: Settings) -> list[Path]:
    """The roots to look after, by name.

    Those that are no folder at the moment are left out, as are those that were noted and are not
    allowed any more.
    """
    noted = (root for root in _noted(settings) if _is_allowed(settings, root))
    return [root for root in settings.maintain or noted if root.is_dir()]


def unregister_job(settings: Settings, root: str | Path) -> bool:
    """Forget a root that was removed for good; whether it was noted."""
    try:
        (_folder(settings) / f"{job_id(root)}.json").unlink()
    except FileNotFoundError:
        return False
    return True


def select_roots(root: str | None, settings: Settings) -> list[Path]:
    """The root that was named, or all that are known.

    Raises:
        ConfigError: the one that was named is not an absolute path of a folder, or not allowed.
    """
    if root is None:
        return list_known_roots(settings)
    require_allowed(settings, root)
    if not Path(root).is_absolute() or not Path(root).is_dir():
        raise ConfigError(
            f"root {root!r} is not the full path of a folder on this node; pass the job's root, or "
            "none for all jobs that are known"
        )
    return [Path(root).resolve()]


def require_allowed(settings: Settings, path: str | Path) -> None:
    """See that flows may work at a path that somebody gave them as a parameter.

    Raises:
        ConfigError: it is not below one of ``TRINITY_SYNC_ALLOWED``.
    """
    if not _is_allowed(settings, path):
        raise ConfigError(
            f"{path} is not below a folder that flows may use on this node: TRINITY_SYNC_ALLOWED "
            f"names {', '.join(map(str, settings.allowed))}. Take a path below one of these, or "
            "have it added there."
        )


def require_allowed_store(settings: Settings, url: str) -> None:
    """As `require_allowed`, of a store: what its URL leads to decides, not how that is spelled.

    Raises:
        ConfigError: it is on this node and not allowed, or it may be; or it is no URL of a store.
    """
    if not settings.allowed:
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
        require_allowed(settings, folder)
    elif protocol not in ELSEWHERE:
        raise ConfigError(
            f"{url} may lead to folders of this node, of which flows may use those alone that "
            f"TRINITY_SYNC_ALLOWED names. Take a store of {', '.join(sorted(ELSEWHERE))}, or "
            "file:// with a path below one of these folders."
        )


def _is_allowed(settings: Settings, path: str | Path) -> bool:
    real = Path(path).resolve()
    return not settings.allowed or any(real.is_relative_to(a.resolve()) for a in settings.allowed)


def _noted(settings: Settings) -> list[Path]:
    roots = []
    for note in sorted(_folder(settings).glob("*.json")):
        try:
            roots.append(Path(json.loads(note.read_text())["root"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            continue  # forgotten meanwhile, or not ours
    return roots


def _folder(settings: Settings) -> Path:
    return settings.home / "roots"
