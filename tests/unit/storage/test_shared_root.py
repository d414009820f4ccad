"""A group shares a root, and another user of it makes links of its names, or writes its records.

What the other user gains is nothing that the victim's processes write, read into a commit or remove
elsewhere. Several users may still train in one root, one after the other.
"""

import _strptime  # noqa: F401, which another user may not be able to import
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.disk import look
from tests.support.dying import ANOTHER_USER, as_another_user
from tests.support.job import Job
from tests.support.meanwhile import when_opened, when_renamed
from tests.support.steps import MODEL, commit_files
from trinity_sync.cli.commands import app
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.client.cut import ask_roles
from trinity_sync.client.init_root import open_root
from trinity_sync.client.run_context import find_start_key
from trinity_sync.errors import ConfigError, MissingShardsError, SaveError, TrinitySyncError
from trinity_sync.formats import hf_export
from trinity_sync.formats.safetensors import PROGRESS, ExportProgress, open_progress, read_progress
from trinity_sync.fs.atomic import make_folder, move, pin_folder, remove_tree
from trinity_sync.fs.file_system import read_file_system_time
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FULL_CHECKPOINT_MARK,
    ITERATION_FILES,
    KINDS,
    MANIFEST,
    PRIVATE_FOLDER,
    attaching_folder,
    step_folder,
)
from trinity_sync.pipeline.several_nodes import (
    NodeRecord,
    _path,
    await_node_records,
    write_node_record,
)
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves import journal
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.snapshot.packed import pack
from trinity_sync.storage.block_reuse import WORTHWHILE, list_spares, remove_folder
from trinity_sync.storage.commit import commit
from trinity_sync.storage.dcp_folder import FOLDER_FILE, link_step
from trinity_sync.storage.discovery import find_newest, require_committed, warn_of_other_step
from trinity_sync.storage.gc import (
    FILE_REPAIRS,
    remove_attached,
    remove_exports,
    remove_temporaries,
)
from trinity_sync.storage.job_settings import record_replicated, write_job_settings
from trinity_sync.storage.manifest import EXPORTED, FileRecord, write_manifest
from trinity_sync.storage.metrics import remove_metrics, write_metrics
from trinity_sync.storage.persist import make_attempt_path
from trinity_sync.storage.placement import read_placement, write_placement
from trinity_sync.storage.replace import displace_step, fetching_folder
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import hold_run, open_run
from trinity_sync.storage.steps_in_use import is_pinned, lease_to_read, list_leases, pin, tag, unpin
from trinity_sync.storage.uncommitted import exports_folder, remove_export_files
from trinity_sync.storage.verify import check_files, choose_files, judge_steps
from trinity_sync.weights.state_files import (
    SynchronizerState,
    read_sync_report,
    write_address,
    write_state,
)

SECRET = b"years of work"
FOLDERS = (
    "",
    *("runs", "placements", "pins", "leases", "metrics", "stored", "exports", "journal", "cuts"),
    *("weights", "spare", "attaching", "replacing", "trash", "fetching", "quarantine"),
)
"""Those of the private folder that ``docs/reference/files.md`` names, and it itself."""
RECORDS = (
    *("job.json", "identity.json", "runs/1.json", "runs/9.lock", "commit.lock", "removal.lock"),
    *("pins/2.json", "metrics/2.json", "stored/2.json", "cuts/request.json", "saves.jsonl"),
    *("weights/state.json", ".now", "trash.lock", "fetching.lock", "placements/1.actor.json"),
    *("spare/old", "attaching/x", "replacing/global_step_2", "trash/x", "exports/global_step_2.x"),
    f"../global_step_3/{FULL_CHECKPOINT_MARK}",
)
"""A file of each sort, by its path below the private folder."""
NAMED = (
    *("job.json", "identity.json", "runs/1.json", "runs/9.json", "saves.jsonl"),
    *(f"../{name}" for name in (*ITERATION_FILES.values(), f"global_step_2/{MANIFEST}")),
    f"../global_step_2/{MODEL}",
)
"""Records that cannot be ignored, and a shard."""
OTHERS = (
    *(name for name in RECORDS if "." in name.rpartition("/")[2] and name not in NAMED),
    *("leases/2.0123.json", "journal/run1-key.0123.jsonl", "weights/synchronizer.json"),
    *("cuts/critic.json", "pins/best.json", "runs/1.lock", "functions.lock"),
    f"../global_step_2/{CORRUPTION_MARK}",
)
"""Records that are replaced, or count as torn or missing, and locks."""


def state(value: float, size: int = 1 << 19) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value)}


def save(job: Job, step: int, run: int = 1, size: int = 1 << 19) -> None:
    job.commit_states(step, {"model": state(step, size)}, run=run)


def prune_to(job: Job, last: int) -> None:
    rules = Rules(*[parse_policy(f"last={last}")] * 3)
    prune(job.root, plan_prune(job.root, rules, now=2e9))


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the victim with files of all names that trinity_sync removes in its own."""
    folder = tmp_path / "private"
    for name in (
        *("thesis.tex", "0.json", "2.json", "2.0123.json", "saves.jsonl", "lock", ".now"),
        *("run0-key.0123.jsonl", "global_step_2.actor", "request.json", "state.json", "best.json"),
        *("global_step_2/data.csv", "global_step_2.replaced/data.csv", "20200101T000000Z/data.csv"),
        *("x/global_step_2/data.csv", f".2.json.{uuid.uuid4().hex}.tmp", "global_step_2.x/data"),
        f"global_step_2/.a.{uuid.uuid4().hex}.tmp",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SECRET)
    (folder / "large").write_bytes(SECRET * WORTHWHILE)
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    return folder


def a_life(job: Job, tmp_path: Path) -> Iterator[Callable[[], object]]:
    """Whatever writes into a private folder or removes there, each by itself."""
    root = job.root
    yield lambda: open_identity(root)
    yield lambda: write_job_settings(root, {"keep": "last=3"})
    yield lambda: write_job_settings(root, {"keep": None})
    yield lambda: open_run(root, "later", 2)
    yield lambda: hold_run(root, 9).__enter__()
    yield lambda: save(job, 3)
    yield lambda: save(job, 2, run=2)  # in the place of run 1's
    yield lambda: displace_step(replace(job.save(2), run=3))
    yield lambda: pin(root, 3)
    yield lambda: tag(root, 3, "best")
    yield lambda: unpin(root, 2)
    yield lambda: unpin(root, "best")
    yield lambda: lease_to_read(root, 3, "reader").__enter__()
    yield lambda: list_leases(root)
    yield lambda: write_metrics(root, 1, 2, {"reward": 1.0})
    yield lambda: remove_metrics(root, 2, 9)
    yield lambda: record_replicated(root, "s3://there", require_committed(root, 3))
    yield lambda: journal.append(job.request(3), "begun")
    yield lambda: ask_roles(root, "key", 3, ["critic"], timeout_s=0.0)
    yield lambda: write_address(root, "name", "namespace")
    yield lambda: write_state(root, SynchronizerState("job"))
    yield lambda: open_progress(exports_folder(root) / "global_step_2.x", {"of": "another"})
    yield lambda: remove_export_files(root, 2)
    yield lambda: fetch(f"file://{tmp_path}/remote", 8, root)
    yield lambda: read_file_system_time(root)
    yield lambda: save(job, 4)
    yield lambda: prune_to(job, 2)
    yield lambda: save(job, 5)
    yield lambda: rewind(root, 4)
    for repair in FILE_REPAIRS:
        yield lambda repair=repair: list(repair(root))
    yield lambda: list(remove_exports(root, is_fresh=(2e9).__le__))
    yield lambda: list(remove_temporaries(root, images=(), busy=(), is_fresh=(2e9).__le__))
    yield lambda: list(remove_attached(root, waiting=(), is_fresh=(2e9).__le__))
    yield lambda: prune_to(job, 1)
    yield lambda: save(job, 6)


def readers(job: Job) -> Iterator[Callable[[], object]]:
    """A start, `Checkpoints`, commands, a verification and a trainer's thread, each by itself."""
    root = job.root
    yield lambda: open_root(root)
    yield lambda: find_start_key(root, "key")
    yield lambda: write_placement(root, 1, job.key_of(1), "actor", ())
    yield lambda: read_placement(root, 1, job.key_of(1), "actor")
    for kind in KINDS:
        yield lambda kind=kind: Checkpoints(root).latest_step(kind)
    yield lambda: Checkpoints(root).load(2)
    yield lambda: Checkpoints(root).metrics(2)
    yield lambda: judge_steps(check_files(choose_files(root, newest=9)))
    yield lambda: warn_of_other_step(root, 1)
    yield lambda: is_pinned(root, 2)
    yield lambda: read_sync_report(root, 0.0)
    yield lambda: journal.Journal(root).read()
    yield lambda: CliRunner().invoke(app, ["ls", str(root)], catch_exceptions=False)


def live(job: Job, tmp_path: Path) -> list[str]:
    """Do all of it; return the errors."""
    return call(a_life(job, tmp_path))


def call(functions: Iterable[Callable[[], object]]) -> list[str]:
    """Call functions; return the errors."""
    said = []
    for each in functions:
        try:
            each()
        except (OSError, TrinitySyncError) as error:
            said.append(str(error))
    return said


@pytest.fixture
def trained(job: Job, tmp_path: Path) -> Job:
    """With two steps and the copy of a third."""
    open_run(job.root, "first", 0)
    for step in (1, 8, 2):
        save(job, step)
    replicate(job.root, f"file://{tmp_path}/remote", 8)
    shutil.rmtree(step_folder(job.root, 8))
    return job


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_changed_where_the_link_of_a_folder_leads(
    trained: Job, private: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = trained.root / PRIVATE_FOLDER / name
    if link.exists():
        link.rename(trained.root / "moved")
    link.symlink_to(private)
    before = look(private)
    said = live(trained, tmp_path)
    assert look(private) == before
    refused = "it is a link that another user may have made, and is not followed; move it away"
    assert any(refused in text and str(link) in text for text in [*said, caplog.text]), said
    assert not [text for text in said if "/proc/" in text]


@pytest.mark.parametrize("name", RECORDS)
def test_nothing_is_changed_or_copied_where_the_link_of_a_file_leads(
    trained: Job, private: Path, tmp_path: Path, name: str
) -> None:
    link = Path(os.path.normpath(trained.root / PRIVATE_FOLDER / name))
    link.parent.mkdir(exist_ok=True)
    remove_tree(link)
    link.symlink_to(private / "large" if name.startswith("spare") else private / "thesis.tex")
    before = look(private)
    said = live(trained, tmp_path)
    assert look(private) == before
    assert not [text for text in said if "/proc/" in text]
    files = (path for path in trained.root.rglob("*") if path.is_file() and not path.is_symlink())
    assert not [path for path in files if SECRET in path.read_bytes()]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_a_pipe_in_the_place_of_a_record_is_named_and_holds_nothing_up(
    trained: Job, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = Path(os.path.normpath(trained.root / PRIVATE_FOLDER / name))
    pipe.parent.mkdir(exist_ok=True)
    remove_tree(pipe)
    os.mkfifo(pipe)
    said = call((*readers(trained), *a_life(trained, tmp_path)))
    assert not [text for text in said if "/proc/" in text]
    assert name in OTHERS or str(pipe) in "".join([*said, caplog.text])


def exchange(folder: Path, moved: Path, private: Path) -> None:
    """What another user may do in any instant: put a link in the place of a folder."""
    folder.rename(moved)
    folder.symlink_to(private)


def link_of_another_user(link: Path, to: Path) -> None:
    if os.geteuid():
        pytest.skip("only root makes links of another user")
    link.symlink_to(to)
    os.chown(link, ANOTHER_USER, -1, follow_symlinks=False)


def test_a_step_is_saved_through_a_link_of_this_user_and_not_of_another(
    job: Job, private: Path, tmp_path: Path
) -> None:
    (tmp_path / "large disk").mkdir()
    step_folder(job.root, 1).symlink_to(tmp_path / "large disk")
    save(job, 1)
    assert require_committed(job.root, 1)
    link_of_another_user(step_folder(job.root, 2), private)
    before = look(private)
    with pytest.raises(SaveError, match=r"global_step_2: it is a link .* move it away"):
        save(job, 2)
    assert look(private) == before


def test_a_root_may_be_a_link(tmp_path: Path, spool_folder: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpts").symlink_to(tmp_path / "disk")
    job = Job.open(tmp_path / "ckpts", spool_folder)
    save(job, 1)
    save(job, 2)
    prune_to(job, 1)
    assert [path.name for path in tmp_path.glob("disk/global_step_*")] == ["global_step_2"]


def test_a_link_that_takes_the_place_of_a_folder_during_its_removal_is_not_followed(
    tmp_path: Path,
) -> None:
    root, trash = tmp_path / "ckpts", tmp_path / f"ckpts/{PRIVATE_FOLDER}/trash"
    for each in ("first", "second"):
        commit_files(trash / each, 1, nbytes=WORTHWHILE)
        commit_files(tmp_path / "private" / each, 1, nbytes=WORTHWHILE)
    shard = trash / "first/global_step_1/actor/model_world_size_1_rank_0.pt"
    before = look(tmp_path / "private")
    meanwhile = partial(exchange, trash, root / "moved", tmp_path / "private")
    with when_renamed(shard, meanwhile), pytest.raises(OSError, match="is not followed"):
        remove_folder(root, trash / "first", keep=10 * WORTHWHILE)
    assert look(tmp_path / "private") == before
    assert len(list_spares(root)) == 1


@pytest.mark.parametrize("attached", [False, True])
def test_a_link_that_takes_the_place_of_a_folder_while_a_shard_is_written_is_not_followed(
    job: Job, private: Path, tmp_path: Path, attached: bool
) -> None:
    for step in (1, 2):
        save(job, step)
    prune_to(job, 1)
    (at,) = list_spares(job.root)  # which is written over
    folder = step_folder(job.root, 3) / "actor"
    if attached:
        at = attaching_folder(job.root) / "x/data.csv"
        make_folder(at.parent)
        at.write_bytes(SECRET)
        (tmp_path / "copied, since it has two names").hardlink_to(at)
    packed = pack({}, {"actor/x": at}) if attached else None
    job.stager().stage(job.origin(3), {"model": state(3)}, attachments=packed)
    before = look(private)
    meanwhile = partial(exchange, folder, tmp_path / "moved", private)
    with (when_opened if attached else when_renamed)(at, meanwhile):
        written = job.persist(3, "attachments" if attached else "model")
    assert len([*(tmp_path / "moved").iterdir()]) == 1
    with pytest.raises((OSError, MissingShardsError), match=r"followed.*actor'|lacks model"):
        commit(job.save(3), written)
    assert look(private) == before


def test_a_link_that_takes_the_place_of_a_folder_during_a_download_is_not_followed(
    trained: Job, private: Path, tmp_path: Path
) -> None:
    url, folder = f"file://{tmp_path}/remote", step_folder(fetching_folder(trained.root), 8)
    (record,) = Remote(url).read_manifest(8).files
    temporary = make_attempt_path(folder / record.path, "fetch", record.digest[-32:])
    before = look(private)
    meanwhile = partial(exchange, temporary.parent, tmp_path / "moved", private)
    with when_opened(temporary, meanwhile), suppress(OSError, TrinitySyncError):
        fetch(url, 8, trained.root)
    assert look(private) == before
    assert (tmp_path / "moved" / Path(record.path).name).exists()


def test_what_is_removed_later_is_not_removed_where_a_link_of_its_folder_leads(
    job: Job, tmp_path: Path
) -> None:
    elsewhere, private, old = tmp_path / "elsewhere", job.root / PRIVATE_FOLDER, "run0-a.0.jsonl"
    exported = commit_files(job.root, 1) / "actor/huggingface"
    manifest = require_committed(job.root, 1)
    weights = FileRecord("actor/huggingface/thesis.tex", 1, "", "actor", EXPORTED)
    write_manifest(job.root, replace(manifest, files=(*manifest.files, weights)))
    (private / "journal").mkdir()
    (private / "journal" / old).touch()
    os.utime(private / "journal" / old, (0, 0))
    (exported / "thesis.tex").touch()
    moved = {each: elsewhere / each.name for each in (exported, private / "journal")}
    elsewhere.mkdir()
    for folder in moved:
        exchange(folder, moved[folder], moved[folder])
    cuts = private / "cuts", elsewhere / "cuts", elsewhere / "cuts"
    with when_opened(private / "cuts/critic.json", partial(exchange, *cuts)):
        call([lambda: ask_roles(job.root, "key", 1, ["critic"], timeout_s=0.0)])
    journal._remove_old(private / "journal", 1)
    nothing = ExportProgress(Path(), {})
    (said,) = call([lambda: hf_export._add_to_step(job.root, manifest, "actor", nothing)])
    assert "it is a link" in said
    for name in ("cuts/request.json", f"journal/{old}", "huggingface/thesis.tex"):
        assert (elsewhere / name).exists(), name


@pytest.mark.parametrize("end", ["spare", "trash"])
def test_neither_end_of_a_rename_is_led_elsewhere_by_a_link(
    tmp_path: Path, private: Path, end: str
) -> None:
    there = tmp_path / PRIVATE_FOLDER
    for folder in (there / "spare", there / "trash"):
        make_folder(folder)
    (there / "spare/large").write_bytes(b"shard")
    before = look(private)
    meanwhile = partial(exchange, there / end, tmp_path / "moved", private)
    with when_renamed(there / "spare/large", meanwhile):
        move(there / "spare/large", there / "trash/x")
    assert look(private) == before
    assert (there / "trash/x" if end == "spare" else tmp_path / "moved/x").read_bytes() == b"shard"


def test_a_pinned_folder_stays_the_same_and_its_errors_have_its_name(tmp_path: Path) -> None:
    trash, moved = tmp_path / PRIVATE_FOLDER / "trash", tmp_path / "moved"
    make_folder(trash)
    with pin_folder(trash) as folder:
        trash.rename(moved)
        (folder / "x").touch()
    assert (moved / "x").exists()
    (tmp_path / PRIVATE_FOLDER / "spare").touch()
    with pytest.raises(NotADirectoryError), pin_folder(tmp_path / PRIVATE_FOLDER / "spare"):
        pass
    make_folder(trash)
    with pytest.raises(FileNotFoundError) as raised, pin_folder(trash) as folder:
        (folder / "x").rename(folder / "y")
    assert (raised.value.filename, raised.value.filename2) == (f"{trash}/x", f"{trash}/y")


def test_a_record_of_a_node_that_names_files_elsewhere_moves_none(job: Job, tmp_path: Path) -> None:
    job.stage(1, {"model": state(1)})
    (file,) = job.persist(1)
    secret = tmp_path / "thesis.tex"
    secret.write_bytes(SECRET)
    request = job.request(1)
    nodes = [job.share, replace(job.share, node="there")]
    altered = [
        replace(file, temporary=str(secret)),
        replace(file, temporary=f"{Path(file.temporary).parent}/../../../thesis.tex"),
        replace(file, record=replace(file.record, path="../../thesis.tex")),
    ]
    for each in altered:
        write_node_record(request, 1, NodeRecord(True, (each,)))
        with pytest.raises(SaveError, match=rf"{_path(request, 1)} was altered"):
            await_node_records(request, nodes, rank_timeout_s=1.0)
    write_node_record(request, 1, NodeRecord(True, (file,)))
    (persisted,) = await_node_records(request, nodes, rank_timeout_s=1.0)
    commit(job.save(1), persisted.written)
    assert secret.read_bytes() == SECRET


def test_an_export_moves_and_overwrites_no_file_elsewhere(tmp_path: Path) -> None:
    folder, secret = tmp_path / PRIVATE_FOLDER / "exports/global_step_1.actor", tmp_path / "thesis"
    secret.write_bytes(SECRET)
    progress = open_progress(folder, {"step": 1})
    (folder / "model.safetensors").symlink_to(secret)
    progress.write_file("model.safetensors", lambda path: path.write_bytes(b"model"))
    assert secret.read_bytes() == SECRET
    text = (folder / PROGRESS).read_text()
    assert read_progress(folder)
    (folder / PROGRESS).write_text(text.replace("model.safetensors", "../../../thesis"))
    assert read_progress(folder) is None


def test_another_user_names_no_folder_that_a_step_is_linked_into(job: Job, tmp_path: Path) -> None:
    folder = commit_files(job.root, 1) / "actor"
    (tmp_path / "private").mkdir()
    (tmp_path / "private/.metadata").write_bytes(SECRET)
    (folder / FOLDER_FILE).write_text("private")
    (folder / FOLDER_FILE).chmod(0o664)
    with pytest.raises(ConfigError, match="another user may have named"):
        link_step(job.root, 1, "actor")
    assert [*(tmp_path / "private").iterdir()] == [tmp_path / "private/.metadata"]


@pytest.fixture
def shared(no_umask: None) -> Iterator[Path]:
    """A folder of a group: not below pytest's own, which is closed to others at each start."""
    os.umask(0o002)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o2775)
        yield Path(name)


def test_users_of_a_group_train_in_one_root_in_turn(shared: Path) -> None:
    root = shared / "ckpts"

    def train(run: int, *steps: int) -> None:
        job = Job.open(root, shared / f"spool of {os.getuid()}")
        open_run(root, str(run), steps[0] - 1)
        for step in steps:
            save(job, step, run, size=9)  # OpenMP's threads for a large one survive no fork
            write_metrics(root, run, step, {"reward": step})
            tag(root, step, "best", force=True)
            with lease_to_read(root, step, "reader"):
                prune_to(job, 2)
        for repair in FILE_REPAIRS:
            assert not list(repair(root))
        job.close()

    train(1, 1, 2, 3)
    as_another_user(lambda: train(2, 3, 4, 5), gid=os.getgid())
    train(3, 5, 6, 7)
    as_another_user(lambda: train(4, 8, 9, 10), gid=os.getgid())
    found = find_newest(root)
    assert (found.step, found.run) == (10, 4)
    assert stat.S_IMODE((root / PRIVATE_FOLDER / "trash").stat().st_mode) & 0o020
