"""Patch a library: names of its modules once they are imported, attributes within a block.

A switch names the patch for each module. It imports none of them: a module that is imported already
is patched at once, others when they are imported.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from trinity_sync.errors import ConfigError

Patch = Callable[[ModuleType], None]
Call = Callable[..., Any]


def patch_after_import(patches: Mapping[str, Patch]) -> None:
    """Apply each patch to the module of its full name, once the module has been executed.

    Raises:
        ConfigError: A module that is imported already lacks a name; later ones raise it when they
            are imported.
    """
    for name, patch in patches.items():
        if name in sys.modules:
            _apply(patch, sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(patches))


def wrapper(around: Call) -> Callable[[Call], Call]:
    """Return a function that wraps another one, with which ``around`` is called as first argument.

    The other arguments are those of the call.
    """

    @wraps(around)
    def wrap_function(original: Call) -> Call:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        return call

    return wrap_function


def wrap(wrappers: Mapping[str, str], *, within: Sequence[str] = ()) -> Patch:
    """Return a patch that wraps functions of a module, and methods of its classes (``Class.name``).

    Each is replaced by what its wrapper, ``module:function``, returns for it. A function is also
    replaced in the modules of packages, ``within``, that have imported it.
    """

    def patch(module: ModuleType) -> None:
        for name, wrapper in wrappers.items():
            owner, _, last = name.rpartition(".")
            of = getattr(module, owner) if owner else module
            new = resolve_name(wrapper)(getattr(of, last))
            setattr(of, last, new) if owner else rebind(module, last, new, within=within)

    return patch


def rebind(module: ModuleType, name: str, new: Any, *, within: Sequence[str]) -> None:
    """Replace a name of a module, and of the modules in some packages that have imported it."""
    old = getattr(module, name)
    packages = tuple(f"{package}." for package in within)
    for other in [each for key, each in list(sys.modules.items()) if key.startswith(packages)]:
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)


@contextmanager
def replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an object or a class within the block."""
    own = {name: value for name, value in vars(owner).items() if name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:  # of its class
                delattr(owner, name)


def _apply(patch: Patch, module: ModuleType) -> None:
    try:
        patch(module)
    except AttributeError as error:
        library = module.__name__.partition(".")[0]
        raise ConfigError(
            f"{module.__name__} lacks what trinity_sync replaces there ({error}); install a "
            f"supported version of {library}, or switch trinity_sync off"
        ) from error


class _PatchingFinder(MetaPathFinder):
    """Finds modules with the other finders, and patches them once they are executed."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (patch := self._patches.get(fullname)):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # also those of other switches
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _apply(patch, module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
