"""What ``import trinity_sync`` gives, what it needs, and what it costs."""

import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import pytest
from packaging.requirements import Requirement

import trinity_sync
from tests.support.forked import Program

LOOK_AT_EVERYTHING = """
import inspect, pydoc, sys
from importlib.machinery import PathFinder

for name in [*sys.modules]:  # as tests have imported pytest
    if name.partition(".")[0] in sys.argv[1:]:
        del sys.modules[name]
find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.partition(".")[0] in sys.argv[1:] else find_spec(name, *more)
)
import trinity_sync
names = set(trinity_sync.__all__)
assert names <= set(dir(trinity_sync))
assert names <= {name for name, _ in inspect.getmembers(trinity_sync)}
for each in (trinity_sync, *(getattr(trinity_sync, name) for name in names - {"__version__"})):
    assert pydoc.render_doc(each)
starred = {}
exec("from trinity_sync import *", starred)
assert names <= set(starred)
assert not set(sys.argv[1:]) & set(sys.modules)
"""
EXTRAS = importlib.metadata.metadata("trinity-sync").get_all("Provides-Extra") or []
OF_FEW = {
    *("LaidOut", "SaveRequest"),  # of adapters: `save_dcp` and `SaveTrigger`
    *("FullTensor", "ImageRef"),  # parts of a version
    *("Reader", "Status"),  # answers of the Synchronizer
    "Parent",  # what `CheckpointCoordinator.parents` returns
}
"""Types of public signatures that few callers name."""


def list_modules(extras: Iterable[str]) -> set[str]:
    """Return the top-level modules of what this package and some of its extras need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [("trinity-sync", {"", *extras})]
    while waiting:
        name, wanted = waiting.pop()
        if name in found and not wanted - {""}:
            continue
        with suppress(importlib.metadata.PackageNotFoundError):  # of another system, or Python
            found[name] = importlib.metadata.distribution(name)
            for each in map(Requirement, found[name].requires or ()):
                if not each.marker or any(each.marker.evaluate({"extra": e}) for e in wanted):
                    waiting.append(
                        (each.name, {"", *each.extras} if name == "trinity-sync" else {""})
                    )
    tops = {file.parts[0] for each in found.values() for file in each.files or ()}
    return {top.removesuffix(".py") for top in tops if top.removesuffix(".py").isidentifier()}


@pytest.mark.parametrize(
    "extras",
    [EXTRAS, ["stack"], ["verl"], ["hf"]],
    ids=lambda each: "all" if each == EXTRAS else each[0],
)
def test_every_public_name_is_found_and_explained_without_the_packages_of(
    extras: list[str],
) -> None:
    masked = list_modules(extras) - list_modules([])
    Program(LOOK_AT_EVERYTHING, *sorted(masked), preloaded=["torch.distributed"]).end()


def test_the_types_of_public_signatures_are_public() -> None:
    lacking = {
        type_.__name__
        for name in trinity_sync.__all__
        if inspect.isclass(each := getattr(trinity_sync, name))
        if not issubclass(each, Exception)
        for function in list_public_functions(each)
        for type_ in iter_types(get_type_hints(function).values())
        if type_.__module__.startswith("trinity_sync")
        if getattr(trinity_sync, type_.__name__, None) is not type_
    }
    assert lacking == OF_FEW


def list_public_functions(cls: Any) -> list[Any]:
    named = {name: each for name, each in inspect.getmembers(cls) if name[0] != "_"}
    properties = [each.fget for each in named.values() if isinstance(each, property)]
    routines = [each for each in named.values() if inspect.isroutine(each)]
    ours = [each for each in routines if each.__module__.startswith("trinity_sync")]
    return [cls.__init__, *ours, *properties]


def iter_types(hints: Iterable[Any]) -> Iterator[type]:
    for hint in hints:
        if isinstance(hint, type):
            yield hint
        if isinstance(hint, list):
            yield from iter_types(hint)
        yield from iter_types(get_args(hint))


def test_the_version_is_that_of_the_package_and_an_unknown_name_an_attribute_error() -> None:
    assert trinity_sync.__version__ == importlib.metadata.version("trinity-sync")
    with pytest.raises(AttributeError, match="'trinity_sync' has no attribute 'Coordinator'"):
        trinity_sync.Coordinator  # type: ignore[attr-defined]  # noqa: B018


if TYPE_CHECKING:  # a type checker knows which names there are: make lint tells of each other one
    from trinity_sync import Nothing  # type: ignore[attr-defined]  # noqa: F401
    from trinity_sync.integrations.verl import None_  # type: ignore[attr-defined]  # noqa: F401
    from trinity_sync.integrations.vllm import No  # type: ignore[attr-defined]  # noqa: F401


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pydantic", "httpx", "ray", "importlib.metadata")
    program = (
        "import sys, trinity_sync; dir(trinity_sync); trinity_sync.SaveFailedError; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
