"""One module decides what has become of a save, and one what is committed; the others ask them."""

import ast
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path(__file__).parents[3] / "trinity_sync"
ROWS = {"retention/removal.py", "orchestration/report/facts.py", "cli/report_html.py"}
"""Their rows have kinds of their own, which were those of valid manifests."""
RECORDS = {"storage/manifest.py", "storage/job_settings.py"}


def find_compared(attribute: str) -> Iterator[tuple[str, ast.Compare]]:
    """Yield the comparisons of an attribute's values, and the modules that have them."""
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(isinstance(side, ast.Attribute) and side.attr == attribute for side in sides):
                yield path.relative_to(PRODUCT).as_posix(), node


def test_a_manifest_alone_tells_which_kinds_it_has() -> None:
    asking = {module for module, _ in find_compared("kinds")}
    assert "storage/manifest.py" in asking
    assert asking <= ROWS | RECORDS


def test_the_words_of_the_journal_are_compared_in_the_package_of_saves_alone() -> None:
    words = {"pending", "left", "completed"}
    asking = {
        module
        for module, node in find_compared("state")
        if words & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    }
    assert asking <= {"saves/journal.py", "saves/save_status.py"}


def test_what_has_become_of_a_save_is_decided_for_waits_savers_and_lists_by_one_function() -> None:
    deciding = {
        path.relative_to(PRODUCT).as_posix()
        for path in PRODUCT.rglob("*.py")
        if "Facts(" in path.read_text()
    }
    table = "saves/save_status.py"
    assert deciding <= {table, "saves/pending_save.py", "orchestration/report/steps.py"}
