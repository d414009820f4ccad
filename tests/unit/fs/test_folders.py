"""What a folder has is listed whole, or an error is raised."""

from pathlib import Path

import pytest

from tests.support.disk import no_file_opens
from trinity_sync.fs.atomic import list_paths, walk_files


def test_a_folder_that_cannot_be_opened_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.pt").touch()
    (tmp_path / "link").symlink_to("below")
    for each in (lambda: list_paths(tmp_path, "*"), lambda: [*walk_files(tmp_path)]):
        with no_file_opens(), pytest.raises(OSError, match="Too many open files"):
            each()
    assert list_paths(tmp_path, "l*") == [tmp_path / "link"]
    assert {*walk_files(tmp_path)} == {tmp_path / "below" / "a.pt", tmp_path / "link"}
    assert [*list_paths(tmp_path / "none", "*"), *walk_files(tmp_path / "none")] == []
