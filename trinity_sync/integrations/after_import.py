"""Changes to a few names of other people's modules, each made right after the module was imported.

A switch says which change belongs to which module. Nothing is imported for it: a module that is
there already is changed at once, another one when somebody imports it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def change_after_import(changes: Mapping[str, Change]) -> None:
    """Have each module, by its full name, changed once it has been run."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(changes))


def rebind(module: ModuleType, name: str, new: Any, *, within: Sequence[str]) -> None:
    """Give ``name`` another meaning, also in modules of these packages that have imported it."""
    old = getattr(module, name)
    packages = tuple(f"{package}." for package in within)
    for other in [each for key, each in list(sys.modules.items()) if key.startswith(packages)]:
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)


class _AfterImport(MetaPathFinder):
    """Finds modules as Python does without it, and makes the change once they are run."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.get(fullname)
        spec = self._found_by_others(fullname, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """What the finders after this one say, among them those of other switches."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if spec := finder.find_spec(fullname, path, target):
                return spec
        return None
