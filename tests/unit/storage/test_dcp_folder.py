"""Files of committed steps are linked where programs look for what they saved with DCP."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.fsdp.commits import CommitsHere
from tests.unit.conftest import Open
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.atomic import remove_tree
from trinity_sync.integrations.dcp import DcpSaver
from trinity_sync.integrations.dcp.writer import StepWriter
from trinity_sync.layout import step_folder
from trinity_sync.storage.commit import finish_interrupted
from trinity_sync.storage.dcp_folder import FOLDER_FILE, RECORD, link_step, read_record
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import encode_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Save = Callable[..., Path]


@pytest.fixture
def saves(coordinator_of: Open) -> CheckpointCoordinator:
    return coordinator_of(trigger=CommitsHere())


@pytest.fixture
def save(saves: CheckpointCoordinator) -> Save:
    """Saves a step that names a folder next to the root; returns the folder."""
    return save_by(saves)


def save_by(saves: CheckpointCoordinator) -> Save:
    saver = DcpSaver(saves)

    def make(step: int, name: str = "last", *, keep: int = 0, value: float = 0) -> Path:
        folder = saves.root.parent / name
        folder.mkdir(exist_ok=True)
        writer = StepWriter(saver, step, keep, {FOLDER_FILE: name.encode()})
        state = {"w": torch.full((1 << 20,), value or float(step))}
        dcp.async_save(state, storage_writer=writer, async_stager=writer, no_dist=True).result()  # type: ignore[union-attr]
        finish_commits(saves)
        return folder

    return make


def finish_commits(saves: CheckpointCoordinator) -> None:
    trigger = saves._watcher._trigger
    assert isinstance(trigger, CommitsHere)
    trigger.finish()


def load(folder: Path) -> float:
    state = {"w": torch.zeros(1 << 20)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["w"].unique().item()


def test_a_folder_has_the_newest_save_that_named_it_and_keeps_it_without_the_step(
    saves: CheckpointCoordinator, save: Save
) -> None:
    first = save(1, "first", keep=1)
    assert [load(save(step, keep=1)) for step in (2, 3)] == [2.0, 3.0]
    assert not step_folder(saves.root, 1).exists()
    assert load(first) == 1.0  # its blocks were not written over
    link_step(saves.root, 3, "actor")  # as by a commit that is repeated
    assert load(saves.root.parent / "last") == 3.0


def test_a_folder_that_is_saved_again_without_a_change_gets_no_other_files(save: Save) -> None:
    names = [sorted(each.name for each in save(step, value=7.0).iterdir()) for step in (1, 2)]
    assert names[0] == names[1]


def test_a_commit_that_is_repeated_leaves_a_later_save_and_brings_no_removed_folder_back(
    saves: CheckpointCoordinator, save: Save
) -> None:
    save(1)
    folder = save(2)
    link_step(saves.root, 1, "actor")
    assert load(folder) == 2.0
    folder.rename(folder.with_name("renamed"))
    with pytest.raises(FileNotFoundError):
        link_step(saves.root, 2, "actor")
    assert not folder.exists()


def test_a_later_run_that_counts_from_one_again_replaces_what_is_linked(
    saves: CheckpointCoordinator, save: Save, coordinator_of: Open
) -> None:
    save(1)
    save(2)
    remove_tree(step_folder(saves.root, 2))
    remove_tree(step_folder(saves.root, 1))
    saves.close()
    later = save_by(coordinator_of(run_key="later", trigger=CommitsHere()))
    assert [load(later(step, value=step + 0.5)) for step in (1, 2)] == [1.5, 2.5]


def test_a_run_that_a_restored_root_has_lost_keeps_no_folder(
    saves: CheckpointCoordinator, save: Save
) -> None:
    folder = save(1)
    record = read_record(folder)
    (folder / RECORD).write_bytes(encode_manifest(replace(record, run=9, step=9)))
    (folder / "__0_0.distcp").unlink()  # it has another name in the root
    (folder / "__0_0.distcp").write_bytes(b"of run 9")
    link_step(saves.root, 1, "actor")
    assert load(folder) == 1.0


def test_a_commit_that_died_before_it_linked_is_finished(
    saves: CheckpointCoordinator, save: Save
) -> None:
    folder = save(1)
    (folder / ".metadata").unlink()
    manifest = require_committed(saves.root, 1)
    origin = saves._submitter.make_origin(1, "actor", "checkpoint")
    assert origin.run == manifest.run
    finish_interrupted(origin.save)
    assert load(folder) == 1.0


def test_a_folder_that_cannot_take_all_files_is_no_checkpoint(
    saves: CheckpointCoordinator, save: Save
) -> None:
    folder = save(1)
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").mkdir()
    with pytest.raises(dcp.api.CheckpointException):
        load(folder)
    save(2)  # committed, whatever its program's folder is like
    assert saves.latest_step() == 2
    assert not (folder / ".metadata").exists()
    assert not (folder / RECORD).exists()


def test_nothing_is_linked_outside_of_the_folder_next_to_the_root(
    saves: CheckpointCoordinator, save: Save, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (saves.root.parent / "link").symlink_to(other)
    save(1, "link")
    save(2, f"../{other.name}")
    assert saves.latest_step() == 2
    assert not [*other.iterdir()]
    with pytest.raises(ConfigError, match="outside"):
        link_step(saves.root, 1, "actor")


def test_a_record_that_was_altered_is_refused(save: Save) -> None:
    folder = save(1)
    record = folder / RECORD
    record.write_text(record.read_text().replace("xxh3", "xxh4"))
    with pytest.raises(CommitError, match="remove the file"):
        read_record(folder)
