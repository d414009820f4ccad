"""What a folder has is listed whole, or an error is raised."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import trinity_sync
from tests.support.disk import no_file_opens
from tests.support.meanwhile import not_listed
from trinity_sync.fs.atomic import list_paths, walk_files
from trinity_sync.layout import attaching_folder
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import list_prunable_quarantine
from trinity_sync.storage.gc import (
    empty_trash,
    remove_attached,
    remove_replaced,
    remove_temporaries,
)
from trinity_sync.storage.replace import (
    _list_unfinished,
    fetching_folder,
    quarantine_folder,
    replacing_folder,
)
from trinity_sync.storage.uncommitted import is_being_written
from trinity_sync.weights.committed import _list_weight_files

MAY_GLOB = {
    "client/init_root.py": "what killed probes have left, which the next start removes",
    "fs/file_system.py": "/proc",
    "fs/process.py": "/proc",
    "integrations/huggingface.py": "whether there is a step, for a warning",
    "integrations/huggingface_state.py": "a folder of its own in memory",
    "integrations/lightning.py": "checkpoints of Lightning's own, for a warning",
    "orchestration/worker.py": "files of the stack, which a cleaner should find young",
    "storage/restore.py": "folders of killed processes in /tmp, which may not be readable",
    "weights/folder/writer.py": "what killed publishers have left, likewise",
}


def test_a_folder_that_cannot_be_opened_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.pt").touch()
    (tmp_path / "link").symlink_to("below")
    for each in (lambda: list_paths(tmp_path, "*"), lambda: [*walk_files(tmp_path)]):
        with no_file_opens(), pytest.raises(OSError, match="Too many open files"):
            each()
    assert list_paths(tmp_path, "l*") == [tmp_path / "link"]
    assert list_paths(tmp_path, "b*/*.pt") == [tmp_path / "below" / "a.pt"]
    assert {*walk_files(tmp_path)} == {tmp_path / "below" / "a.pt", tmp_path / "link"}
    assert [*walk_files(tmp_path, "*.pt")] == [tmp_path / "below" / "a.pt"]
    assert [*list_paths(tmp_path / "none", "*"), *walk_files(tmp_path / "none")] == []


def test_nothing_lists_a_root_by_what_takes_such_a_folder_for_empty() -> None:
    package = Path(trinity_sync.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("glob", "rglob")
    }
    assert found == {*MAY_GLOB}


@pytest.mark.parametrize(
    ("name", "list_them"),
    [
        ("global_step_1/actor", lambda root: [is_being_written(root, 1, within_s=60)]),
        ("global_step_1/actor", lambda root: _list_unfinished(root / "global_step_1")),
        ("global_step_1/actor", lambda root: _list_weight_files(root / "global_step_1/actor")),
        (
            "global_step_1",
            lambda root: remove_temporaries(root, images=(), busy=(), is_fresh=(9e9).__le__),
        ),
        (
            attaching_folder(""),
            lambda root: remove_attached(root, waiting=(), is_fresh=(9e9).__le__),
        ),
        (replacing_folder(""), remove_replaced),
        (fetching_folder(""), remove_replaced),
        (".trinity_sync/trash", empty_trash),
        (
            quarantine_folder(""),
            lambda root: list_prunable_quarantine(root, parse_policy("last=1"), 9e9),
        ),
    ],
)
def test_what_cleans_a_root_says_that_it_may_not_list_it(
    tmp_path: Path, name: str | Path, list_them: Callable[[Path], Iterable[object]]
) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert [*list_them(tmp_path)] in ([], [False])
    with not_listed(tmp_path / name), pytest.raises(PermissionError, match=str(name)):
        [*list_them(tmp_path)]
