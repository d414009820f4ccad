"""What the documents cite is there."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
TESTS = "\n".join(path.read_text() for path in REPOSITORY.glob("tests/**/*.py"))


def test_every_invariant_is_shown_by_a_test_that_exists() -> None:
    text = (REPOSITORY / "docs/concepts/save.md").read_text()
    table = text.partition("## What must always hold")[2].partition("\n## ")[0]
    cited = re.findall(r"[a-z0-9]+(?:_[a-z0-9]+){2,}", "".join(re.findall(r"\|[^|]+\|\n", table)))
    assert len(cited) > 50
    there = set(re.findall(r"def test_(\w+)\(", TESTS))
    assert [name for name in cited if name not in there] == []


def test_every_file_of_tests_that_is_cited_exists() -> None:
    documents = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    cited = {
        path
        for document in documents
        for path in re.findall(r"tests/[\w/]+\.py", document.read_text())
    }
    assert [path for path in sorted(cited) if not (REPOSITORY / path).exists()] == []


def test_the_path_of_a_save_names_functions_that_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \|[^|]+\|([^|]+)\|([^|]+)\|$", text, re.MULTILINE)
    assert len(rows) == 10
    for functions, files in rows:
        defined = set()
        for name in re.findall(r"`([\w/.]+)`", files):
            (path,) = (
                p for p in (REPOSITORY / name, REPOSITORY / "trinity_sync" / name) if p.is_file()
            )
            defined |= {
                node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")
            }
        cited = {part for name in re.findall(r"`([\w.]+)`", functions) for part in name.split(".")}
        assert cited <= defined
