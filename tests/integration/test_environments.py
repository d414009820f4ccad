"""The client can be installed in the environments of trainers, as an independent resolver says."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
WHERE_PEOPLE_TRAIN = (
    "verl[vllm]==0.9.1",
    "verl==0.9.1",
    "trl[vllm]",
    "vllm==0.33.0",
    "sglang==0.5.23",
    "areal==1.0.4",
    "lightning",
    "torchtitan==0.3.0",
)


def resolve(
    folder: Path, *requirements: str, python: str = "3.11", lock: Path | None = None
) -> str:
    """Why no versions satisfy all requirements; empty if some do."""
    wanted = folder / "requirements.in"
    wanted.write_text("\n".join(requirements))
    compile_ = ["-m", "uv", "pip", "compile", "--quiet", "--python-version", python]
    compile_ += ["--constraints", str(lock)] if lock else []
    done = subprocess.run(
        [sys.executable, *compile_, str(wanted), "-o", str(folder / "requirements.txt")],
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("package", WHERE_PEOPLE_TRAIN)
def test_an_environment_with_it_has_room_for_the_client(
    package: str, wheel: Path, tmp_path: Path
) -> None:
    if why := resolve(tmp_path, package, f"trinity-sync @ {wheel.as_uri()}"):
        alone = resolve(tmp_path, package)
        assert alone, why
        pytest.skip(f"{package} cannot be installed by itself: {alone.splitlines()[-1]}")


@pytest.mark.parametrize(
    ("python", "extras"), [("3.11", "dev,demo"), ("3.12", "dev,demo"), ("3.13", "test")]
)
def test_the_lock_is_for_the_versions_of_python_that_the_readme_names(
    python: str, extras: str, wheel: Path, tmp_path: Path
) -> None:
    readme = (CHECKOUT / "README.md").read_text()
    assert "Python 3.11 to 3.13" in readme
    assert "Python 3.11 or Python 3.12, as veRL does" in readme
    dev = f"trinity-sync[{extras}] @ {wheel.as_uri()}"
    assert resolve(tmp_path, dev, python=python, lock=CHECKOUT / "constraints.txt") == ""
