"""Private names of Prefect stand in one module, which refuses a Prefect that lacks one."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import prefect
import pytest
from prefect.context import SettingsContext
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.server.services import db_vacuum
from prefect.tasks import Task
from prefect.workers.base import BaseJobConfiguration, BaseWorker

import trinity_sync
from tests.support.answers import server
from trinity_sync.errors import MissingPackageError, UnsupportedPrefectError
from trinity_sync.orchestration import prefect_compat
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack.services import StackState, build_environment

PROJECT = Path(trinity_sync.__file__).parents[1]
MODULE = Path(prefect_compat.__file__)
PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOCUMENTED = re.compile(
    r"prefect(\.(artifacts|client\.orchestration|client\.schemas\.\w+|events(\.[\w.]+)?|exceptions"
    r"|flows|futures|runtime|settings|states|tasks|workers\.base))?\.\w+"
)
"""Public names that Prefect describes; all others belong into the guarded module."""
OURS = "trinity_sync.orchestration.prefect_compat."
OWNERS = (BaseWorker, BaseJobConfiguration(), SettingsContext, Flow, Task, PrefectFuture, db_vacuum)
KNOWN = {name for owner in OWNERS for name in dir(owner)}
KNOWN |= {*BaseWorker.__init__.__code__.co_names, *BaseJobConfiguration.__private_attributes__}
KNOWN = {name for name in KNOWN if PRIVATE.fullmatch(name)}


def used_in(source: str) -> Iterator[str]:
    """Private and undocumented names of Prefect that a module uses or overrides."""
    tree = ast.parse(source)
    theirs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(each.name, each.asname or each.name.split(".")[0]) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(each.name, each.asname or each.name) for each in node.names]
            names = [(f"{node.module}.{name}", bound) for name, bound in found]
        else:
            continue
        for name, bound in names:
            if name.split(".")[0] == "prefect":
                private = any(map(PRIVATE.fullmatch, name.split(".")))
                if name != "prefect" and (private or not DOCUMENTED.fullmatch(name)):
                    yield name
            elif not name.startswith(OURS):
                continue
            theirs.add(bound)
    yield from used_below(tree, theirs, inside=False)


def used_below(tree: ast.AST, theirs: set[str], *, inside: bool) -> Iterator[str]:
    """Private names below a node.

    Args:
        tree: the node.
        theirs: names that were imported from Prefect, or from the guarded module.
        inside: whether it is in a class that is derived from one of these.
    """
    for node in ast.iter_child_nodes(tree):
        derived = inside
        if isinstance(node, ast.ClassDef):
            bases = [word for base in node.bases for word in ast.walk(base)]
            derived = any(isinstance(word, ast.Name) and word.id in theirs for word in bases)
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            text = ast.unparse(node)
            own = text.startswith(("self.", "cls.")) and not inside
            if text.split(".")[0] in theirs or (node.attr in KNOWN and not own):
                yield text
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and inside:
            yield from KNOWN & {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and inside:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from KNOWN & {target.id for target in targets if isinstance(target, ast.Name)}
        yield from used_below(node, theirs, inside=derived)


@pytest.mark.parametrize("package", ["trinity_sync", "flows", "tasks"])
def test_private_names_of_prefect_are_used_in_one_module(package: str) -> None:
    modules = set((PROJECT / package).rglob("*.py")) - {MODULE}
    assert {path: names for path in modules if (names := [*used_in(path.read_text())])} == {}


@pytest.mark.parametrize("default_of", ["the settings", "the server"])
def test_a_flow_runs_wherever_a_site_stores_results_that_no_flow_has(default_of: str) -> None:
    program = """
import asyncio
from prefect.results import get_default_result_storage
from prefect.workers.base import BaseWorker
from trinity_sync.orchestration.worker import TrinitySyncWorker

async def start(*_):
    print(type(get_default_result_storage(_sync=True)).__name__)

BaseWorker.start = start
asyncio.run(TrinitySyncWorker("any").start())
"""
    elsewhere = {"default_result_storage_block_id": str(uuid4())}
    with server({"/admin/storage": (200, json.dumps(elsewhere))}) as url:
        env = {**os.environ, "PREFECT_API_URL": url}
        if default_of == "the settings":
            env["PREFECT_DEFAULT_RESULT_STORAGE_BLOCK"] = "s3-bucket/results"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "LocalFileSystem", done.stderr


def test_a_prefect_that_lacks_a_name_is_refused_by_that_name() -> None:
    remove = "prefect.workers.base.BaseWorker._submit_run"
    owner, _, name = remove.rpartition(".")
    program = f"""
import pkgutil, prefect, prefect.workers.base
delattr(pkgutil.resolve_name({owner!r}), {name!r})
prefect.__version__ = "3.12.0"
from trinity_sync.errors import TrinitySyncError
try:
    import trinity_sync.orchestration.worker
except TrinitySyncError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == (
        f"Prefect 3.12.0 has no {remove}, which trinity_sync needs; "
        f'install "prefect{prefect_compat.SUPPORTED}"'
    ), done.stderr


def test_what_a_prefect_or_its_server_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "like_prefect").mkdir()
    (tmp_path / "like_prefect/engine.py").write_text("import not_installed\nrun = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match="No module named 'not_installed'") as caught:
        prefect_compat.look_up("like_prefect.engine.run")
    assert caught.value.name == "not_installed"
    with pytest.raises(UnsupportedPrefectError, match=r"has no like_prefect\.flows\.run"):
        prefect_compat.look_up("like_prefect.flows.run")
    monkeypatch.delattr(db_vacuum, "_maintenance_session")
    with pytest.raises(UnsupportedPrefectError, match=r"has no .*db_vacuum\._maintenance_session"):
        prefect_compat.wrap_vacuum_session(lambda session: session)


def test_the_supported_versions_are_those_of_the_requirements_and_the_tests_run_on_one() -> None:
    requirements = (PROJECT / "pyproject.toml").read_text()
    assert f'"prefect{prefect_compat.SUPPORTED}",' in requirements
    specifiers = pytest.importorskip("packaging.specifiers")
    assert prefect.__version__ in specifiers.SpecifierSet(prefect_compat.SUPPORTED)


def test_a_pool_has_no_variables_as_its_worker_runs_flows_in_no_infrastructure() -> None:
    template = TrinitySyncWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name="any", type=TrinitySyncWorker.type, base_job_template=template)
    # whose defaults the server would validate at each run
    assert pool.base_job_template["variables"]["properties"] == {}


LOGS = """
import logging, sys
from prefect.logging.configuration import setup_logging

setup_logging()
called = []
sys.setprofile(lambda frame, *_: called.append(frame.f_code.co_name))
named = {"flow_run_name": "one", "send_to_api": False}
logging.getLogger("prefect.flow_runs").info("says %s", "it", extra=named)
sys.setprofile(None)
print(called.count("highlight_regex"))
"""


def log_as_the_stack(home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    env = build_environment(Settings(home=home), StackSettings(), StackState()) | variables
    command = [sys.executable, "-c", LOGS]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True)


def test_a_log_file_is_not_searched_for_what_a_terminal_would_color(tmp_path: Path) -> None:
    done = log_as_the_stack(tmp_path)
    assert "INFO    | Flow run 'one' - says it" in done.stderr
    assert done.stdout == "0\n"


def test_a_user_may_have_other_handlers_of_logs(tmp_path: Path) -> None:
    own = tmp_path / "logging.yml"
    handlers = "handlers: {console: {class: logging.StreamHandler}}"
    own.write_text(f"version: 1\n{handlers}\nroot: {{level: INFO, handlers: [console]}}\n")
    assert "says it" in log_as_the_stack(tmp_path, PREFECT_LOGGING_SETTINGS_PATH=str(own)).stderr
