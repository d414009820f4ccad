"""What other programs load because this package is installed never raises in them."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, ClassVar

import pytest

FACTORY = "vllm.distributed.weight_transfer.factory"
MASKED = """
import sys
class Mask:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "ray", "xxhash"):  # Prefect needs none of them
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Mask())
"""
LOAD = """
from prefect.plugins import load_prefect_collections
found = load_prefect_collections()
print({name: isinstance(each, Exception) for name, each in found.items()})
"""


class Registry:
    """The registry of a vLLM that is supported."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, engine: str) -> None:
        assert name not in cls._registry
        cls._registry[name] = (module, engine)


def load_into(monkeypatch: pytest.MonkeyPatch, registry: type | None) -> None:
    """Do what vLLM does with its plug-ins, in a vLLM with this registry."""
    parts = FACTORY.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[FACTORY]
    if registry:
        module.WeightTransferEngineFactory = registry
    (plugin,) = entry_points(group="vllm.general_plugins", name="trinity_sync")
    plugin.load()()


def test_vllm_gets_the_back_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "_registry", {})
    for _ in range(2):
        load_into(monkeypatch, Registry)
    engine = ("trinity_sync.integrations.vllm.engine", "TrinitySyncEngine")
    assert Registry._registry == {"trinity_sync": engine}


@pytest.mark.parametrize(
    "registry",
    [
        None,
        type("OtherAttribute", (), {"register_engine": Registry.register_engine}),
        type("OtherMethod", (), {"_registry": {}}),
    ],
)
def test_a_vllm_with_another_registry_starts_and_is_warned(
    registry: type | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_into(monkeypatch, registry)
    (said,) = caplog.records
    assert (said.levelno, "this vLLM is not supported" in said.message) == (logging.WARNING, True)


def test_the_plugin_of_vllm_imports_nothing_else_of_this_package() -> None:
    program = (
        "import sys; before = set(sys.modules); import trinity_sync.integrations.vllm.plugin;"
        "print(sorted(n for n in set(sys.modules) - before if n.count('.') and 'trinity' in n))"
    )
    ours = ["errors", "integrations", "integrations.vllm", "integrations.vllm.plugin"]
    assert run(program).stdout.strip() == str([f"trinity_sync.{name}" for name in ours])


@pytest.mark.parametrize(
    "before",
    [MASKED, "import prefect.flow_engine\ndel prefect.flow_engine.run_flow\n"],
    ids=["no packages", "no private name"],
)
def test_a_prefect_that_the_stack_cannot_run_with_loads_us_with_one_warning(before: str) -> None:
    done = run(before + LOAD)
    assert done.stdout.strip() == "{'trinity_sync': False}"
    (said,) = done.stderr.strip().splitlines()
    assert "WARNING" in said
    assert "the worker type trinity-sync is not available: " in said


def test_a_supported_prefect_gets_the_worker_type_without_a_word() -> None:
    done = run(
        LOAD + "from prefect.workers.base import BaseWorker\n"
        "print(BaseWorker.get_worker_class_from_type('trinity-sync').__name__)"
    )
    assert done.stdout.splitlines() == ["{'trinity_sync': False}", "TrinitySyncWorker"]
    assert done.stderr == ""


def run(program: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
