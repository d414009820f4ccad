"""What the documents cite is there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
TESTS = "\n".join(path.read_text() for path in REPOSITORY.glob("tests/**/*.py"))


def test_every_invariant_is_shown_by_a_test_that_exists() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    table = text.partition("## What must always hold")[2].partition("\n## ")[0]
    cited = re.findall(r"[a-z0-9]+(?:_[a-z0-9]+){2,}", "".join(re.findall(r"\|[^|]+\|\n", table)))
    assert len(cited) > 50
    there = set(re.findall(r"def test_(\w+)\(", TESTS))
    assert [name for name in cited if name not in there] == []


def test_every_file_of_tests_that_is_cited_exists() -> None:
    documents = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
    cited = {
        path
        for document in documents
        for path in re.findall(r"tests/[\w/]+\.py", document.read_text())
    }
    assert [path for path in sorted(cited) if not (REPOSITORY / path).exists()] == []
