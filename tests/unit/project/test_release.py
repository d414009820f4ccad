"""What a stranger gets: the page on PyPI, the source archive, the versions that are required."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())


def metadata(url: str, site: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"],
        cwd=PROJECT,
        env={**os.environ, "REPOSITORY_URL": url, "SITE_URL": site},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def links_of(shown: dict[str, Any]) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", shown["readme"]["text"])


def test_the_page_links_to_the_files_of_its_version_or_the_site_of_the_release() -> None:
    url = "https://git.example.org/us/trinity_sync"
    shown = metadata(url)
    files = f"{url}/blob/v{shown['version']}/"
    linked = [each.removeprefix(files) for each in links_of(shown) if each.startswith(files)]
    assert len(linked) > 40
    assert all((PROJECT / each.partition("#")[0]).is_file() for each in linked)
    assert shown["urls"]["Issues"] == f"{url}/issues"
    shown = metadata(url, "https://us.example.org/")
    assert "https://us.example.org/how-to/preemption.html#slurm" in links_of(shown)
    assert not [link for link in links_of(shown) if "/docs/" in link]
    assert shown["urls"]["Documentation"] == "https://us.example.org"
    shown = metadata("")
    assert all(link.startswith(("https://", "#")) for link in links_of(shown))
    assert "urls" not in shown
    assert "mermaid" not in shown["readme"]["text"]


def test_classifiers_are_known_and_name_the_versions_of_python_that_are_required() -> None:
    trove = pytest.importorskip("trove_classifiers")
    project = PYPROJECT["project"]
    assert {*project["classifiers"]} <= trove.classifiers
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    first, last = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()  # type: ignore[union-attr]
    assert named == [f"3.{minor}" for minor in range(int(first), int(last))]


def test_the_source_archive_has_tests_and_changelog_and_makes_the_same_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PROJECT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {"CHANGELOG.md", "constraints.txt", "hatch_build.py", "README.md"} <= names
    assert f"tests/unit/project/{Path(__file__).name}" in names


def test_what_the_client_imports_is_required() -> None:
    clients = next(
        each["source_modules"]
        for each in PYPROJECT["tool"]["importlinter"]["contracts"]
        if each["name"] == "the client side needs nothing of the stack's environment"
    )
    required = {Requirement(each).name for each in PYPROJECT["project"]["dependencies"]}
    imported = {
        name.partition(".")[0].replace("_", "-")
        for module in clients
        for path in (PROJECT / module.replace(".", "/")).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_in(node)
    }
    assert imported - required - {"trinity-sync"} == set()


def names_in(node: ast.AST) -> list[str]:
    """Packages of others that a statement imports."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module]
    return [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]


@pytest.mark.parametrize("name", ["ci.yml", "newest.yml", "release.yml"])
def test_what_a_workflow_makes_is_there(name: str) -> None:
    workflow = yaml.safe_load((PROJECT / ".github/workflows" / name).read_text())
    makefile = (PROJECT / "Makefile").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    for target in re.findall(r"make ([a-z-]+)", json.dumps(workflow, default=str)):
        assert re.search(rf"^[a-z0-9 -]*\b{target}\b[a-z0-9 -]*:", makefile, re.MULTILINE), target


def test_the_tests_that_the_makefile_names_are_there() -> None:
    targets = ["client", "chaos", "lowest", "torch-oldest", "veomni", "torchtitan", "trl", "vllm"]
    shown = subprocess.run(
        ["make", "--dry-run", *targets], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    named = {*re.findall(r"tests/[\w/*.]+", shown.stdout)}
    assert len(named) > 20, named
    assert [each for each in named if not [*PROJECT.glob(each)]] == []
