"""What ``import trinity_sync`` gives, and what it costs."""

import importlib.metadata
import subprocess
import sys

import pytest

import trinity_sync
from trinity_sync import errors


@pytest.mark.parametrize("name", trinity_sync.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert name in dir(trinity_sync)
    assert getattr(trinity_sync, name) is not None


def test_every_error_is_public() -> None:
    assert {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TrinitySyncError)
    } <= {*trinity_sync.__all__}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert trinity_sync.__version__ == importlib.metadata.version("trinity-sync")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'trinity_sync' has no attribute 'Coordinator'"):
        trinity_sync.Coordinator  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pydantic", "httpx", "ray", "importlib.metadata")
    program = (
        "import sys, trinity_sync; dir(trinity_sync); trinity_sync.SaveFailedError; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
