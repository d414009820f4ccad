"""It can be installed where people train, as a resolver says that nobody here wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def resolve(folder: Path, *requirements: str) -> str:
    """Why no versions satisfy all requirements; empty if some do."""
    wanted = folder / "requirements.in"
    wanted.write_text("\n".join(requirements))
    compile_ = ["-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.11"]
    done = subprocess.run(
        [sys.executable, *compile_, str(wanted), "-o", str(folder / "requirements.txt")],
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    "package", ["verl[vllm]==0.9.1", "verl==0.9.1", "trl[vllm]", "vllm==0.33.0", "lightning"]
)
def test_an_environment_with_it_has_room_for_this_project(package: str, tmp_path: Path) -> None:
    if why := resolve(tmp_path, package):
        pytest.skip(f"{package} cannot be installed by itself: {why.splitlines()[-1]}")
    assert resolve(tmp_path, package, f"trinity-sync @ {PROJECT.as_uri()}") == ""
