"""Changes to other people's modules, made when those are imported."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_sync import ConfigError
from trinity_sync.integrations.import_hooks import Patch, patch_after_import


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that was not imported yet."""
    (tmp_path / "somebody_elses.py").write_text("said = ['theirs']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "somebody_elses"
    sys.modules.pop("somebody_elses", None)


def says(what: str) -> Patch:
    return lambda module: module.said.append(what)


def test_two_switches_can_change_the_same_module_before_and_after_its_import(theirs: str) -> None:
    patch_after_import({theirs: says("first")})
    patch_after_import({theirs: says("second")})
    module = importlib.import_module(theirs)
    assert module.said == ["theirs", "first", "second"]
    patch_after_import({theirs: says("late")})
    assert module.said == ["theirs", "first", "second", "late"]


def test_a_module_that_lacks_what_is_replaced_is_named(theirs: str) -> None:
    patch_after_import({theirs: lambda module: setattr(module.Trainer, "fit", None)})
    with pytest.raises(ConfigError, match=rf"{theirs} lacks .*'Trainer'.*switch trinity_sync off"):
        importlib.import_module(theirs)
