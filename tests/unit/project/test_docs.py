"""What the documents cite is there, and what they show can be run."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import typer

from tests.environments.nfs.__main__ import FILES as NFS
from trinity_sync.cli.commands import app

REPOSITORY = Path(__file__).parents[3]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    *PAGES,
    *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
CODE = [
    path
    for part in ("trinity_sync", "flows", "tasks")
    for path in (REPOSITORY / part).rglob("*.py")
]
UNIT_TESTS = sorted(REPOSITORY.glob("tests/unit/**/test_*.py"))
TESTS = "\n".join(path.read_text() for path in REPOSITORY.glob("tests/**/*.py"))
BLOCK = re.compile(r"^([ ]*)```(\w+)?[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in BLOCK.findall(path.read_text()):
        if language in languages:
            yield "\n".join(line.removeprefix(indent) for line in text.splitlines())


@pytest.mark.parametrize(("page", "count"), [("invariants", 150), ("reports", 25)])
def test_every_row_is_shown_by_a_test_that_exists(page: str, count: int) -> None:
    text = (DOCS / f"contributing/{page}.md").read_text()
    cited = re.findall(r"[a-z0-9]+(?:_[a-z0-9]+){2,}", "".join(re.findall(r"\|[^|]+\|\n", text)))
    assert len(cited) > count
    there = set(re.findall(r"def test_(\w+)\(", TESTS))
    there |= {path.stem.removeprefix("test_") for path in REPOSITORY.glob("tests/**/test_*.py")}
    assert [name for name in cited if name.removeprefix("test_") not in there] == []


def test_every_test_in_the_table_of_engines_and_every_file_of_tests_that_is_cited_exists() -> None:
    cited = re.findall(r"`(test_\w+)`", (DOCS / "reference/engines.md").read_text())
    assert len(cited) > 15
    assert [name for name in cited if f"def {name}(" not in TESTS] == []
    files = {
        path
        for document in DOCUMENTS
        for path in re.findall(r"tests/[\w/]+\.py", document.read_text())
    }
    assert [path for path in sorted(files | {*NFS}) if not (REPOSITORY / path).exists()] == []


def test_a_unit_test_is_in_the_folder_of_its_package() -> None:
    packages = {path.stem for path in (REPOSITORY / "trinity_sync").iterdir()}
    packages |= {"flows", "benchmarks", "project"}
    files = [path.relative_to(REPOSITORY / "tests/unit") for path in UNIT_TESTS]
    assert [path for path in files if path.parts[0] not in packages] == []


def test_every_link_of_the_documents_outside_of_the_site_leads_to_a_file() -> None:
    dead = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        if document not in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_the_path_of_a_save_names_functions_that_do_something_and_the_table_packages() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \|[^|]+\|([^|]+)\|([^|]+)\|$", text, re.MULTILINE)
    assert len(rows) == 10
    all_files = {name for _, files in rows for name in re.findall(r"`([\w/.]+)`", files)}
    count = sum(len(re.findall(r"`[\w.]+`", functions)) for functions, _ in rows)
    assert f"These are {count} functions in {len(all_files)} files." in text
    for functions, files in rows:
        paths = [path_of(name) for name in re.findall(r"`([\w/.]+)`", files)]
        does = {name for path in paths for name in list_functions(ast.parse(path.read_text()))}
        assert {*re.findall(r"`([\w.]+)`", functions)} <= does
    table = text[text.index("| package | contents |") : text.index("## The path of a save")]
    named = re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)))
    assert len(named) > 20
    for name in named:
        assert path_of(name if name.endswith("/") else f"{name}.py").is_dir() == name.endswith("/")


def test_where_to_go_for_a_change_names_files_and_what_is_in_them() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    table = text[text.index("| change | files") : text.index("## Documentation")]
    rows = re.findall(r"^\| [a-z][^|]+\|([^|]+)\|$", table, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        words = re.findall(r"`([\w/.]+)`", row)
        paths = [path_of(word) for word in words if "/" in word or "." in word]
        named = "\n".join(path.read_text() for path in paths if path.is_file())
        others = {"ls", "runs", "wait_all"}  # what a user calls
        names = {word for word in words if "/" not in word and "." not in word}
        assert {n for n in names - others if not re.search(rf"\b{n}\b", named)} == set()


def test_the_times_of_the_design_notes_are_those_of_the_code_in_their_order() -> None:
    text = (DOCS / "contributing/design.md").read_text()
    tables = text[text.index("## Times") : text.index("## Prefect")].split("\n\n")
    times = [re.findall(r"^\| ([\d.]+) \|.*\| (.+) \|$", each, re.MULTILINE) for each in tables]
    assert sum(map(len, times)) > 20
    for rows in times:
        assert [float(seconds) for seconds, _ in rows] == sorted(float(row[0]) for row in rows)
        for seconds, names in rows:
            assert {read_constant(each) for each in re.findall(r"`([\w.]+)`", names)} == {
                float(seconds)
            }


def read_constant(name: str) -> float:
    """The seconds of a constant below trinity_sync, or of the default of a class's field."""
    owner, _, attribute = name.rpartition(".")
    there = pkgutil.resolve_name(f"trinity_sync.{owner}")
    found = getattr(there() if isinstance(there, type) else there, attribute)
    found = found[0] if isinstance(found, tuple) else found
    return float(found.total_seconds() if isinstance(found, timedelta) else found)


def test_functions_fit_a_screen_and_classes_a_head() -> None:
    long = set()
    for node in (node for path in CODE for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            is_class = isinstance(node, ast.ClassDef)
            lines = node.end_lineno - node.lineno + 1  # type: ignore[operator]
            if not is_class and text is not None:
                lines -= text.count("\n") + 1
            if lines > (400 if is_class else 60):
                long.add(node.name)
    assert long <= {"CheckpointCoordinator"}  # half of which is the text of the API page


def path_of(name: str) -> Path:
    """The file or folder that a document names, of the repository or of the package."""
    (path,) = (p for p in (REPOSITORY / name, REPOSITORY / "trinity_sync" / name) if p.exists())
    return path


def list_functions(parent: ast.AST, prefix: str = "") -> Iterator[str]:
    """The functions and methods in some code, without those that only raise."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            yield from list_functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not isinstance(
            [*node.body, None][ast.get_docstring(node) is not None], ast.Raise
        ):
            yield f"{prefix}{node.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_the_python_of_a_page_compiles_and_imports_what_is_there(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trinity_sync"):
                with suppress(ImportError):  # of what is not installed here
                    module = importlib.import_module(node.module)
                    lacking = [each.name for each in node.names if not hasattr(module, each.name)]
                    assert lacking == [], f"{node.module} has no {lacking}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_the_commands_of_a_page_can_be_parsed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in ("ckpts", "operated", "fresh"):  # an argument that is a folder is a root
        (tmp_path / job).mkdir()
    monkeypatch.chdir(tmp_path)
    group = typer.main.get_command(app)
    for line in commands_of(page):
        if line == ["--version"]:  # which needs no command
            continue
        found, words = group, line
        while words and words[0] in getattr(found, "commands", {}):
            found, words = found.commands[words[0]], words[1:]
        assert not hasattr(found, "commands"), f"trinity-sync {shlex.join(line)} is no command"
        found.make_context(line[0], list(words))


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words after ``trinity-sync`` of each command in the blocks of a page."""
    text = "\n".join(blocks(page, "sh", "console")).replace("\\\n", " ")
    for line in text.splitlines():
        if found := re.match(
            r"(?:\$ )?(?:\w+=\S+ )*trinity-sync ((?:[^#|;&\"']|\"[^\"]*\"|'[^']*')*)", line
        ):
            yield shlex.split(found[1])


def test_every_message_that_is_quoted_is_one_of_the_code() -> None:
    texts = "\n".join(text for path in CODE for text in literals(path))
    quoted = [
        (page.name, message)
        for page in PAGES
        for message in re.findall(r"`([^`]+)`\{\.message\}", page.read_text())
    ]
    assert len(quoted) > 5
    assert [each for each in quoted if any(p not in texts for p in parts_of(each[1]))] == []


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_message_of_what_saves_without_a_stack_names_its_parts() -> None:
    packages = ("fs", "tensors", "snapshot", "storage", "saves", "pipeline", "retention", "remote")
    paths = [path for path in CODE if path.parent.name in packages]
    paths += [REPOSITORY / f"trinity_sync/{name}.py" for name in ("saver", "layout", "errors")]
    assert len(paths) > 60
    found = [
        (path.name, node.value)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"Prefect |flow run|\bworkers? ", node.value) and "\n" not in node.value
    ]
    assert [each for each in found if not is_docstring(each[1])] == []


def is_docstring(text: str) -> bool:
    """Whether a text of one line is a sentence of its own, as no part of a message is."""
    return text[:1].isupper() and text.endswith(".")


def parts_of(message: str) -> list[str]:
    """Return the texts around the values of a message, which stand as ``…`` in a document."""
    return [part.strip() for part in message.split("…") if part.strip()]


def test_each_name_of_verls_checkpoint_config_is_on_the_page_of_its_settings() -> None:
    found = importlib.util.find_spec("verl")
    if not found or not found.origin:
        pytest.skip("veRL is not installed here")
    names = {
        statement.target.id
        for file in ("trainer/config/config.py", "workers/config/checkpoint.py")
        for node in ast.parse((Path(found.origin).parent / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("CheckpointConfig")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    text = (DOCS / "how-to/verl-settings.md").read_text().partition("## CheckpointConfig")[2]
    assert names == {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)}


def test_every_variable_that_is_named_is_a_setting() -> None:
    code = "\n".join(path.read_text() for path in CODE)
    settings = {name.upper() for name in re.findall(r"^    (\w+): ", code, re.MULTILINE)}
    named = {
        name
        for document in [*DOCUMENTS, *REPOSITORY.glob("deploy/*.yaml")]
        for name in re.findall(
            r"TRINITY_SYNC_(?:STACK__\w+?__)?([A-Z][A-Z_]*[A-Z])\b", document.read_text()
        )
    }
    assert sorted(n for n in named - settings if f"TRINITY_SYNC_{n}" not in code) == []


def test_every_error_has_an_advice() -> None:
    from trinity_sync import errors

    text = (DOCS / "_hooks/advice.py").read_text()
    advised = set(re.findall(r'^    "(\w+)": ', text, re.MULTILINE))
    assert advised == {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.TrinitySyncError)
    }


@pytest.mark.parametrize("page", sorted(DOCS.glob("how-to/*.md")), ids=lambda path: path.stem)
def test_a_how_to_ends_with_a_check_that_it_works(page: Path) -> None:
    assert re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)[-1] == "Check that it works"


def test_the_pages_of_the_api_have_all_public_names() -> None:
    import trinity_sync
    from trinity_sync import adapter, errors

    text = "".join(page.read_text() for page in DOCS.glob("reference/api*.md"))
    described = set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE))
    names = [*trinity_sync.__all__, *adapter.__all__]
    public = {name for name in names if not hasattr(errors, name)}
    assert public - {"__version__"} <= described
