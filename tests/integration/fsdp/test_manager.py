"""What the checkpoint manager saves, what it skips, and what it refuses to load."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.models import Trained
from tests.support.states import differences
from tests.support.waiting import until
from trinity_sync import CommitError, ConfigError
from trinity_sync.integrations.verl import FSDPCheckpointManager
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.storage.discovery import find_newest, read_latest_pointer
from trinity_sync.storage.manifest import read_manifest

MakeManager = Callable[..., FSDPCheckpointManager]


@pytest.fixture(scope="module")
def trained(one_rank: None, tiny: Path) -> Trained:
    one = Trained(tiny, 2)
    one.step()
    return one


@pytest.fixture
def new_run(trained: Trained, root: Path) -> Iterator[MakeManager]:
    """Makes the manager of a new run of the job."""
    with ExitStack() as runs:
        yield lambda **contents: trained.manager(
            runs.enter_context(coordinator_of(root)), **contents
        )


def path(root: Path, step: int) -> str:
    return str(step_folder(root, step) / "actor")


def components(root: Path, step: int) -> list[str]:
    manifest = read_manifest(root, step)
    return sorted({f.component for f in manifest.files}) if manifest else []


def commit(manager: FSDPCheckpointManager, root: Path, step: int) -> None:
    manager.save_checkpoint(path(root, step), step)
    manager.wait_on_save_thread()


def test_the_first_state_dict_before_any_save_only_records_its_version(
    new_run: MakeManager, root: Path
) -> None:
    manager = new_run()
    assert manager.save_state_dict(path(root, 0), 0) is None
    assert manager.initial_version == 0
    assert manager.save_state_dict(path(root, 1), 1) is not None
    manager.wait_on_save_thread()
    assert read_latest_pointer(root, "state_dict") == 1
    assert read_manifest(root, 0) is None


def test_the_initial_version_can_still_be_saved_as_a_checkpoint(
    new_run: MakeManager, root: Path
) -> None:
    manager = new_run()
    manager.save_state_dict(path(root, 5), 5)
    commit(manager, root, 5)
    assert components(root, 5) == ["extra_state", "metadata", "model", "optim"]


def test_a_checkpoint_after_the_sync_of_its_step_stages_no_second_model(
    new_run: MakeManager, root: Path
) -> None:
    manager = new_run()
    manager.save_state_dict(path(root, 0), 0)
    sync = manager.save_state_dict(path(root, 3), 3)
    rest = manager.save_checkpoint(path(root, 3), 3)
    manager.wait_on_save_thread()
    manifest = read_manifest(root, 3)
    assert manifest is not None
    staged = sum(record.nbytes for record in manifest.files if record.component != "metadata")
    assert sync.nbytes + rest.nbytes < 1.5 * staged
    assert components(root, 3) == ["extra_state", "metadata", "model", "optim"]


def test_a_checkpoint_of_the_model_alone_is_made_though_the_sync_of_its_step_has_it(
    new_run: MakeManager, root: Path
) -> None:
    manager = new_run(save_contents=["model"])
    manager.save_state_dict(path(root, 0), 0)
    manager.save_state_dict(path(root, 3), 3)
    assert manager.save_checkpoint(path(root, 3), 3) is not None
    assert manager.save_checkpoint(path(root, 3), 3) is None
    manager.wait_on_save_thread()
    assert read_latest_pointer(root, "checkpoint") == read_latest_pointer(root, "state_dict") == 3


def test_contents_decide_what_is_saved(new_run: MakeManager, root: Path) -> None:
    commit(new_run(save_contents=["model", "extra"]), root, 1)
    assert components(root, 1) == ["extra_state", "metadata", "model"]


def test_a_model_without_an_adapter_is_saved_whole_by_the_setting_for_adapters(
    new_run: MakeManager, root: Path, trained: Trained
) -> None:
    commit(new_run(save_lora_only=True), root, 1)
    saved = torch.load(f"{path(root, 1)}/model_world_size_1_rank_0.pt", weights_only=False)
    assert saved.keys() == trained.model.state_dict().keys()


def test_older_checkpoints_are_removed_once_a_newer_one_is_committed(
    new_run: MakeManager, root: Path
) -> None:
    manager = new_run()
    for step, all_of_them in ((1, None), (1, 0), (2, -1)):
        manager.save_checkpoint(path(root, step), step, all_of_them)
    manager.wait_on_save_thread()
    assert steps_on_disk(root) == [1, 2]
    manager.save_checkpoint(path(root, 3), 3, max_ckpt_to_keep=1)
    until(lambda: steps_on_disk(root) == [3], "the removal of older steps")
    assert find_newest(root).step == 3
    assert manager.previous_saved_paths == [path(root, step) for step in (1, 2, 3)]
    assert manager.max_ckpt_to_keep == 1


def test_contents_decide_what_is_loaded(new_run: MakeManager, root: Path, trained: Trained) -> None:
    first = new_run()
    first.save_checkpoint(path(root, 1), 1)
    saved = trained.state()
    first.wait_on_save_thread()
    trained.step()
    now = trained.state()
    new_run(load_contents=["model"]).load_checkpoint(path(root, 1))
    found = trained.state()
    assert differences(saved["model"], found["model"]) == []
    assert differences(now["optim"], found["optim"]) == []
    assert differences(now["extra_state"], found["extra_state"]) == []


def test_what_verl_saved_elsewhere_is_loaded_by_verl(
    new_run: MakeManager, trained: Trained, tmp_path: Path
) -> None:
    trained.verls_manager().save_checkpoint(path(tmp_path / "theirs", 4), global_step=4)
    before = trained.state()
    trained.step()
    new_run().load_checkpoint(path(tmp_path / "theirs", 4))
    assert differences(before, trained.state()) == []


def test_a_run_that_has_saved_cannot_load_and_keeps_its_state(
    new_run: MakeManager, root: Path, trained: Trained
) -> None:
    manager = new_run()
    commit(manager, root, 1)
    trained.step()
    before = trained.state()
    with pytest.raises(ConfigError, match="load before the first save"):
        manager.load_checkpoint(path(root, 1))
    assert differences(before, trained.state()) == []


def test_a_step_that_is_not_committed_is_not_loaded(new_run: MakeManager, root: Path) -> None:
    manager = new_run()
    commit(manager, root, 1)
    (step_folder(root, 1) / "manifest.json").unlink()
    with pytest.raises(CommitError, match=r"step 1 .* is not committed"):
        manager.load_checkpoint(path(root, 1))


def test_a_sync_is_no_checkpoint_to_resume_from(new_run: MakeManager, root: Path) -> None:
    manager = new_run()
    manager.save_state_dict(path(root, 0), 0)
    manager.save_state_dict(path(root, 1), 1)
    manager.wait_on_save_thread()
    with pytest.raises(CommitError, match="holds no 'optim'"):
        manager.load_checkpoint(path(root, 1))


def test_what_another_number_of_ranks_saved_of_another_model_is_refused(
    new_run: MakeManager, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "global_step_1" / "actor"
    other.mkdir(parents=True)
    for rank in range(4):
        for component in ("model", "optim", "extra_state"):
            torch.save({}, other / f"{component}_world_size_4_rank_{rank}.pt")
    with pytest.raises(ConfigError, match=r"holds another model: names or shapes of .* differ"):
        new_run().load_checkpoint(str(other))


def test_a_path_and_a_step_that_disagree_are_refused(new_run: MakeManager, root: Path) -> None:
    with pytest.raises(ConfigError, match="that of step 4, but global_step is 0"):
        new_run().save_checkpoint(path(root, 4))


def test_a_manager_saves_one_job_only(new_run: MakeManager, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one manager and coordinator for each job"):
        new_run().save_checkpoint(path(tmp_path / "another", 1), 1)


def test_no_path_does_nothing(new_run: MakeManager, root: Path) -> None:
    manager = new_run()
    assert manager.save_checkpoint(None) is None
    assert manager.save_state_dict(None) is None
    manager.load_checkpoint(None)
    assert not list(root.glob("global_step_*"))


@pytest.fixture
def shipped(tiny: Path, tmp_path: Path, trained: Trained) -> Iterator[Path]:
    """The folder that the model was loaded from, to change its small files."""
    folder = tmp_path / "shipped"
    shutil.copytree(tiny, folder)
    before, trained.model.config.name_or_path = trained.model.config.name_or_path, str(folder)
    yield folder
    trained.model.config.name_or_path = before


def test_a_generation_config_that_transformers_does_not_save_is_left_out_and_said_once(
    new_run: MakeManager, root: Path, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shipped / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    manager = new_run()
    said = "checkpoints are saved without generation_config.json"
    assert caplog.text.count(said) == 1  # before the first save
    for step in (1, 2):
        manager.save_checkpoint(path(root, step), step)
    manager.wait_on_save_thread()
    assert caplog.text.count(said) == 1
    saved = {Path(each.path).name for each in read_manifest(root, 2).files}
    assert {"config.json", "tokenizer.json", "fsdp_config.json"} <= saved
    assert "generation_config.json" not in saved


def test_a_generation_config_that_can_be_saved_is(
    new_run: MakeManager, root: Path, shipped: Path
) -> None:
    (shipped / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    commit(new_run(), root, 1)
    saved = step_folder(root, 1) / "actor/huggingface/generation_config.json"
    assert json.loads(saved.read_text())["temperature"] == 0.6


def test_a_tokenizer_that_cannot_be_saved_is_left_out(
    new_run: MakeManager, root: Path, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    class Stateful:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "vocab.txt").write_text("half of it")
            raise NotImplementedError("no serializer")

    trained.tokenizer, tokenizer = Stateful(), trained.tokenizer
    manager = new_run()
    trained.tokenizer = tokenizer
    commit(manager, root, 1)
    assert "without the files of the Stateful, which cannot be saved: no serializer" in caplog.text
    assert not (step_folder(root, 1) / "actor/huggingface/vocab.txt").exists()


def test_a_config_that_cannot_be_saved_is_refused_before_the_training(
    new_run: MakeManager, trained: Trained
) -> None:
    trained.model.config.temperature = 0.6  # of generation, which transformers refuses here
    try:
        with pytest.raises(ConfigError, match=r"(?s)config of the model cannot .* before training"):
            new_run()
    finally:
        del trained.model.config.temperature
