"""Environments of their own for tests: the packages that a wheel needs, and none besides.

They are links to what is installed here, so making one takes no network and a second.
"""

import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(
    folder: Path, wheel: Path, *, extra: str = "", also: Iterable[str] = ()
) -> Path:
    """An environment with a wheel and what it needs; returns its ``bin``.

    Args:
        folder: where; it does not exist yet.
        wheel: what is installed there.
        extra: of the wheel, whose requirements are also installed.
        also: further packages, with what they need.
    """
    venv.create(folder, symlinks=True)
    command = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    pip(folder / "bin", *command)
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = site.glob("*.dist-info")
    wanted = list(Distribution.at(own).requires or ())
    found: dict[str, Distribution] = {}
    extras = {"", extra}
    queue = [(Requirement(each), extras) for each in wanted] + [
        (Requirement(each), {""}) for each in also
    ]
    while queue:
        requirement, extras = queue.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": each}) for each in extras
        ):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found and not requirement.extras:
            continue
        found[name] = installed = distribution(name)
        queue += [
            (Requirement(each), {"", *requirement.extras}) for each in installed.requires or ()
        ]
    for installed in found.values():
        _link(installed, site)
    return folder / "bin"


def pip(binaries: Path, *arguments: str) -> str:
    """Run pip on an environment; returns what it says."""
    command = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def _link(installed: Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        there = Path(str(installed.locate_file(top)))
        link = site / top
        if link.is_dir() and not link.is_symlink():
            _merge(there, link)
        elif link.is_symlink() and there.is_dir() and link.resolve() != there.resolve():
            raise AssertionError(f"{top} is of two distributions")
        elif not link.exists() and there.exists():
            link.symlink_to(there)


def _merge(there: Path, here: Path) -> None:
    for entry in there.iterdir():
        if not (here / entry.name).exists():
            (here / entry.name).symlink_to(entry)
