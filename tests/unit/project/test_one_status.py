"""One module decides what has become of a save, and one what is committed; the others ask them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from trinity_sync.saves.journal import SaveState
from trinity_sync.saves.save_status import SaveStatus

PRODUCT = Path(__file__).parents[3] / "trinity_sync"
ROWS = {
    *("retention/removal.py", "orchestration/report/facts.py", "catalog.py"),
    *("cli/report.py", "cli/steps.py"),
}
"""Their rows have kinds of their own, which were those of valid manifests."""
RECORDS = {"storage/manifest.py", "storage/job_settings.py"}


@cache
def parse_product() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in PRODUCT.rglob("*.py")}


def find_compared(attribute: str, name: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Yield what compares or subtracts an attribute's values, or those of a name, by module."""
    for path, tree in parse_product().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.BinOp) and any(
                (isinstance(each, ast.Attribute) and each.attr == attribute)
                or (isinstance(each, ast.Name) and each.id == name)
                for each in ast.walk(node)
            ):
                yield path.relative_to(PRODUCT).as_posix(), node


def find_asking(words: set[str], attribute: str, name: str = "") -> set[str]:
    """Return the modules that compare such a value with one of some words."""
    return {
        module
        for module, node in find_compared(attribute, name)
        if words & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    }


def test_a_manifest_alone_tells_which_kinds_it_has() -> None:
    asking = {module for module, _ in find_compared("kinds")}
    assert "storage/manifest.py" in asking
    assert asking <= ROWS | RECORDS


def test_the_words_of_the_journal_are_compared_in_the_package_of_saves_alone() -> None:
    asking = find_asking({"begun", "left", "completed"}, "state")
    assert asking <= {"saves/journal.py", "saves/save_status.py"}


def test_a_word_of_the_journal_is_that_of_the_table_of_statuses() -> None:
    assert {*get_args(SaveState)} - {*get_args(SaveStatus)} == {"completed"}  # done, or removed


def test_statuses_of_saves_are_told_apart_in_their_package_alone() -> None:
    words = {*get_args(SaveStatus)}
    of_rows = {"committed", "superseded", "failed"}  # which rows and steps have as well
    asking = find_asking(words - of_rows, "status", "status") | find_asking(
        words, "", "read_status"
    )
    assert asking <= {"saves/save_status.py"}


def test_what_has_become_of_a_save_is_decided_for_waits_savers_and_lists_by_one_function() -> None:
    deciding = {
        path.relative_to(PRODUCT).as_posix()
        for path in PRODUCT.rglob("*.py")
        if "Facts(" in path.read_text()
    }
    assert deciding <= {"saves/save_status.py", "orchestration/report/steps.py"}


def test_a_full_disk_and_a_quota_are_one_reason_that_one_module_names() -> None:
    naming = {path for path in PRODUCT.rglob("*.py") if "EDQUOT" in path.read_text()}
    assert naming == {PRODUCT / "fs/atomic.py"}
