"""Which jobs scheduled flows look after."""

from pathlib import Path

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.job_registry import list_known_roots, select_roots
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import register_root, registry_path


def job_at(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_jobs_are_known_while_they_are_there_allowed_and_not_forgotten_or_if_they_are_named(
    settings: Settings, tmp_path: Path
) -> None:
    one, two = job_at(tmp_path / "a/ckpts"), job_at(tmp_path / "b/ckpts")
    for root in (one, two, one):
        register_root(settings.home, root)
    assert sorted(list_known_roots(settings, StackSettings())) == [one, two]
    allowed = StackSettings(worker={"allowed_paths": [two]})
    assert list_known_roots(settings, allowed) == [two]
    registry_path(settings.home, one).unlink()
    assert list_known_roots(settings, StackSettings()) == [two]
    (settings.home / "roots/torn.json").write_text("{")
    two.rename(tmp_path / "away")
    assert list_known_roots(settings, StackSettings()) == []
    (tmp_path / "away").rename(two)
    assert list_known_roots(settings, StackSettings()) == [two]
    assert select_roots(str(two), settings, StackSettings()) == [two]
    for wrong in ("ckpts", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="full path of a folder"):
            select_roots(wrong, settings, StackSettings())
