"""What the commands print: JSON documents, tables on a terminal, text in a pipe, names, errors."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from runpy import run_path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import psutil
import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.support.command import invoke
from tests.support.job import Job
from tests.support.steps import MODEL, commit_files
from tests.support.terminal import run_at_terminal
from tests.support.waiting import until
from trinity_sync.cli.commands import app
from trinity_sync.cli.output import KEYS, is_time, write_cell
from trinity_sync.client import prefect_connection
from trinity_sync.snapshot.identity import register_root
from trinity_sync.stack import list_missing_packages
from trinity_sync.storage.job_settings import NAMES, JobSettings, read_job_settings
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import pin, tag, unpin

REPOSITORY = Path(__file__).parents[3]
GROUP = typer.main.get_group(app)
COMMANDS = [
    f"{name} {inner}".strip()
    for name, command in GROUP.commands.items()
    for inner in getattr(command, "commands", [""])
]
DOCUMENTS = run_path(str(REPOSITORY / "docs/_hooks/json_documents.py"))["DOCUMENTS"]
"""Noun and content of the JSON document of each command."""
NEED_A_SERVER = {"retry", "up", "restart", "join", "deploy", "ui"}
"""Commands whose documents are compared in `tests/integration`; join prints that of up."""
WITH_THE_STACK = pytest.mark.skipif(
    bool(list_missing_packages()), reason="this environment has the client only"
)


@pytest.fixture
def root(job: Job) -> Path:
    """A job of four steps, one of them tagged, one of weights only; and of a corrupted one."""
    for step in (10, 20, 30):
        job.commit_states(step, {"model": {"w": torch.full((4,), step)}})
    commit_files(job.root, 25, kind="state_dict")
    (commit_files(job.root, 5) / MODEL).write_bytes(b"short")
    tag(job.root, 20, "best", "reward 0.9")
    pin(job.root, 30)
    return job.root


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def list_steps(root: Path) -> list[str]:
    """The steps that ls lists, the newest first."""
    return [line.partition("\t")[0] for line in invoke("ls", root).stdout.splitlines()]


def find_differences(declared: Any, value: Any, at: str = "") -> Iterator[str]:
    """How a value in JSON differs from its declaration as a dataclass."""
    if get_origin(declared) is Annotated:
        declared = get_args(declared)[0]
    if get_origin(declared) in (Union, types.UnionType):
        choices = [each for each in get_args(declared) if each is not type(None)]
        if value is None and len(choices) < len(get_args(declared)):
            return
        if not any(not list(find_differences(each, value, at)) for each in choices):
            yield f"{at}: {value!r} is not {declared}"
    elif is_dataclass(declared):
        hints = get_type_hints(declared)
        expected = {KEYS.get(each.name, each.name): hints[each.name] for each in fields(declared)}
        if not isinstance(value, dict) or list(value) != list(expected):
            yield f"{at}: {value!r} does not have the keys {list(expected)}"
            return
        for name, each in expected.items():
            yield from find_differences(each, value[name], f"{at}.{name}")
    elif get_origin(declared) in (list, tuple, Sequence):
        if not isinstance(value, list):
            yield f"{at}: {value!r} is no list"
            return
        for index, each in enumerate(value):
            yield from find_differences(get_args(declared)[0], each, f"{at}[{index}]")
    elif get_origin(declared) in (dict, Mapping):
        for name, each in value.items():
            yield from find_differences(get_args(declared)[1], each, f"{at}.{name}")
    elif get_origin(declared) is Literal:
        if value not in get_args(declared):
            yield f"{at}: {value!r} is not {declared}"
    elif declared in (str, Path):
        if not (isinstance(value, str) and value) and value is not None:  # None: an empty text
            yield f"{at}: {value!r} is no text"
    elif declared is float and is_time(at.rpartition(".")[2]):
        if value is not None and not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(value)):
            yield f"{at}: {value!r} is no time in UTC"
    elif declared is float and type(value) in (int, float):
        return
    elif type(value) is not declared or value == "":
        yield f"{at}: {value!r} is not {declared}"


def check_document(command: str, text: str) -> Any:
    """Compare the output of a command with its declaration, and return its content."""
    document, (noun, declared) = json.loads(text), DOCUMENTS[command]
    assert list(document) == ["schema", noun]
    assert document["schema"] == 1
    assert list(find_differences(declared, document[noun])) == []
    return document[noun]


def list_commands(root: Path, tmp_path: Path) -> dict[str, list[object]]:
    """A command line for each document, in an order in which all work."""
    url = f"file://{tmp_path}/store"
    return {
        "ls": ["ls", root],
        "show": ["show", root, "latest"],
        "runs": ["runs", root],
        "readers": ["readers", root],
        "report": ["report", root],
        "wait": ["wait", root, 30],
        "jobs set": ["jobs", "set", root, "keep=last=3"],
        "jobs ls": ["jobs", "ls"],
        "verify": ["verify", root, 20],
        "reconcile": ["reconcile", root],
        "remote push": ["remote", "push", root, "best", url],
        "remote pull": ["remote", "pull", tmp_path / "back", "latest", url],
        "merge": ["merge", root, "last=2", tmp_path / "merged"],
        "export dcp": ["export", "dcp", root, "best", tmp_path / "dcp"],
        "metrics": ["metrics", root, "latest", "reward=0.8"],
        "pin": ["pin", root, "latest"],
        "unpin": ["unpin", root, "latest"],
        "prune": ["prune", root, "--keep", "last=1", "--dry-run"],
        "rm": ["rm", root, 25, "--yes"],
        "rewind": ["rewind", root, 20, "--force", "--yes"],
        "jobs forget": ["jobs", "forget", root, "--yes"],
        "status": ["status"],
        "down": ["down"],
        "doctor": ["doctor", root],
        "config show": ["config", "show"],
    }


def test_each_command_prints_the_document_that_is_declared(root: Path, tmp_path: Path) -> None:
    commands = list_commands(root, tmp_path)
    for name, arguments in commands.items():
        done = invoke(*arguments, "-o", "json")
        if name == "jobs forget" and list_missing_packages():  # needs the stack
            assert (done.exit_code, "MissingPackageError" in done.stderr) == (1, True)
            continue
        assert done.exit_code in (0, 3), (name, done.stderr)
        check_document(name, done.stdout)
    model = {"export hf"}  # needs a model of transformers; in test_export
    assert {*commands} | NEED_A_SERVER | model == {*DOCUMENTS}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_its_formats_have_a_document(command: str) -> None:
    done = invoke(*command.split(), "--help")
    assert (done.exit_code, "Example" in done.stdout) == (0, True)
    assert f"trinity-sync {command}" in done.stdout
    documents = {name.partition(" --")[0] for name in DOCUMENTS}
    assert ("--output" in done.stdout) == (command in documents)
    assert documents <= {*COMMANDS}
    if command == "jobs set":
        assert [name for name in NAMES if name not in done.stdout] == []


def test_a_pipe_gets_full_values_between_tabs_and_messages_are_on_stderr(root: Path) -> None:
    done = invoke("ls", root, "--limit", 3)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(row[0], row[2], row[5], row[6]) for row in rows] == [
        ("30", "checkpoint", "valid", "latest; pinned"),
        ("25", "weights", "valid", ""),
        ("20", "checkpoint", "valid", "tagged best: reward 0.9"),
    ]
    assert rows[1][3:5] == ["1002", "2023-11-14T22:13:45Z"]
    assert done.stderr == "2 older steps not shown; use --limit\n"
    assert "\x1b" not in done.stdout
    colored = invoke("--color", "always", "ls", root, "--limit", 9).stdout
    assert "\t\x1b[31mcorrupted\x1b[0m\t" in colored


def at_a_terminal(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    answer: str = "",
    meanwhile: Callable[[], object] = lambda: None,
    columns: int = 80,
) -> tuple[int, str]:
    """The exit code of a command, and what a terminal showed.

    The answer is typed at a question, after what happens meanwhile; the character of code 3 is
    Ctrl-C.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables = inherited | {"COLUMNS": str(columns), "TERM": "xterm"} | dict(env or {})
    answers = [answer] if answer else []

    def type_answer(shown: bytes, command: "subprocess.Popen[bytes]", keyboard: int) -> None:
        if answers and b"[y/N]: " in shown:
            meanwhile()
            if answers.pop() == "\x03":
                # before it waits, Python would read on and act on the signal after the answer
                until(lambda: psutil.Process(command.pid).status() == "sleeping", "a wait")
                command.send_signal(signal.SIGINT)
            else:
                os.write(keyboard, f"{answer}\n".encode())

    line = [sys.executable, "-m", "trinity_sync", *map(str, arguments)]
    return run_at_terminal(line, variables, look=type_answer)


def test_a_terminal_shows_a_table_without_boxes_in_its_width(root: Path) -> None:
    code, shown = at_a_terminal("ls", root)
    lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    assert (code, lines[0].split()) == (
        0,
        ["STEP", "RUN", "KIND", "SIZE", "AGE", "STATUS", "NOTES"],
    )
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].startswith(" " * 40)  # why step 5 is corrupted goes on
    valid = r"  30    1  checkpoint .*B +[\d.]+ m?s  \x1b\[32mvalid\x1b\[0m +latest"
    assert re.search(valid, shown)
    assert "\x1b[31mcorrupted\x1b[0m" in shown
    assert "\x1b" not in at_a_terminal("ls", root, env={"NO_COLOR": "1"})[1]


def test_a_long_value_in_any_column_is_wrapped_to_the_width_of_the_terminal(
    home: Path, tmp_path: Path
) -> None:
    root = tmp_path / "a-root-with-a-long-name" / "and-another-one" / "checkpoints-of-a-job"
    commit_files(root, 1)
    register_root(home, root)
    url = "postgresql://a-host-with-a-long-name.example.org/" + "x" * 60
    named = {"TRINITY_SYNC_STACK__CATALOG__URL": url}
    for words, variables, value in (
        (("jobs", "ls"), {"TRINITY_SYNC_SAVER": "auto"}, str(root)),
        (("config", "show"), named, url),
    ):
        code, shown = at_a_terminal(*words, env=variables)
        lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
        assert code == 0, shown
        assert all(len(line) <= 80 for line in lines), shown
        wrapped = r"(?: .*\n *)?".join(map(re.escape, value))  # other columns are between
        assert re.search(wrapped, "\n".join(lines)), shown
    assert write_cell("files", ["a\nb", "c"], on_terminal=False) == "a b, c"


def test_what_cannot_be_undone_is_asked_first(root: Path) -> None:
    prune = ("prune", root, "--keep", "last=1", "--keep-weights", "last=1")
    for refused in (invoke(*prune), invoke("rewind", root, 20)):
        assert (refused.exit_code, "not confirmed" in refused.stderr) == (2, True)
        assert "pass --yes" in refused.stderr
    unpin(root, "best")
    code, shown = at_a_terminal(*prune, answer="n")
    assert (code, "remove 2 steps" in shown) == (1, True)
    code, shown = at_a_terminal(*prune, answer="\x03")
    assert code == 130, shown
    assert list_steps(root) == ["30", "25", "20", "10", "5"]
    code, shown = at_a_terminal(*prune, answer="y")
    assert (code, "would be removed" in shown, "remove 2 steps" in shown) == (0, True, True)
    assert invoke(*prune).exit_code == 0  # nothing is left to remove
    assert list_steps(root) == ["30", "25", "5"]


def test_a_folder_that_is_no_root_passes_no_command_but_the_one_that_makes_it_one(
    tmp_path: Path,
) -> None:
    (empty := tmp_path / "empty").mkdir()
    lines = ["verify {}", "wait {}", "wait {} 5", "ls {}", "show {} latest", "report {}"]
    for line in (*lines, "runs {}", "readers {}", "doctor {}", "pin {} 5", "retry {} 5"):
        done = invoke(*line.format(empty).split())
        assert (done.exit_code, "is no root of a job" in done.stderr) == (2, True), line
    assert invoke("jobs", "set", empty, "keep=last=3").exit_code == 0
    for line in ("verify {}", "wait {}", "ls {}", "report {} -o json"):
        assert invoke(*line.format(empty).split()).exit_code == 0, line


def test_a_narrow_terminal_breaks_no_word_and_cuts_digests(job: Job) -> None:
    job.commit_states(20, {"model": {"w": torch.zeros(3)}})
    for line, words in (
        ("show {} 20", "ROLE COMPONENT TENSORS LARGEST NONFINITE UNCHANGED SINCE actor model"),
        ("ls {}", "STEP KIND STATUS NOTES checkpoint valid latest"),
        ("runs {}", "REASON checkpoint committed"),
    ):
        code, shown = at_a_terminal(*line.format(job.root).split(), columns=60)
        found = re.sub(r"\x1b\[\d+m", "", shown).split()
        assert (code, {*words.split()} - {*found}) == (0, set()), shown
    code, shown = at_a_terminal("show", job.root, 20)
    assert (code, "actor/model_world_size_1_rank_0.pt" in shown) == (0, True), shown
    assert re.search(r"xxh3-128:\w{8}…", shown)
    assert re.search(r"\txxh3-128:\w{32}\t", invoke("show", job.root, 20).stdout)


def test_a_reader_that_has_enough_is_no_error(root: Path) -> None:
    command = f"{sys.executable} -m trinity_sync ls {root} | sleep 0"
    piped = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(piped, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_down_asks_first_while_an_image_is_not_committed(
    root: Path, job: Job, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"server": None, "ray": None, "worker": None, "ray_address": "127.0.0.1:9"}
    stack = home / "stack.json"
    home.mkdir(exist_ok=True)
    stack.write_text(json.dumps(state))
    stack.chmod(0o600)
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(job.spool.folder.parent))
    job.stage(40, {"model": {"w": torch.zeros(4)}})
    refused = invoke("down")
    assert (refused.exit_code, "1 steps in shared memory are not" in refused.stderr) == (2, True)
    job.commit(40)
    assert invoke("down").stdout == "stopped\n"
    assert not stack.exists()


def test_a_torn_pin_can_be_removed(root: Path) -> None:
    for name in ("torn", "torn-too"):
        tag(root, 20, name)
        (root / ".trinity_sync" / "pins" / f"{name}.json").write_text('{"form')
    done = invoke("unpin", root, "torn", "-o", "json")
    assert check_document("unpin", done.stdout) == {"step": None, "removed": True, "tags": []}
    assert invoke("unpin", root, "best").exit_code == 0  # another one is torn
    assert invoke("unpin", root, 30).stdout == "unpinned step 30\n"
    assert invoke("unpin", root, "torn-too").stdout == "unpinned torn-too\n"
    assert invoke("ls", root).exit_code == 0


def test_prune_removes_what_was_confirmed_and_nothing_else(root: Path) -> None:
    def commit_more() -> None:  # under the policy, steps 20 and 30 would go as well
        for step in (40, 50):
            commit_files(root, step)

    unpin(root, 30)
    unpin(root, "best")
    prune = ("prune", root, "--keep", "last=2")
    code, shown = at_a_terminal(*prune, answer="y", meanwhile=commit_more)
    assert (code, "remove 1 steps" in shown) == (0, True)
    assert list_steps(root) == ["50", "40", "30", "25", "20", "5"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["ls", "ROOT"], 0, ""),
        (["show", "ROOT", 11], 1, "CommitError"),
        (["verify", "ROOT", 11], 1, "CommitError"),
        (["pin", "ROOT", 11], 1, "CommitError"),
        (["ls", "no/such/folder"], 2, "ConfigError"),
        (["ls", "nonsense://x/y"], 2, "ConfigError"),
        (["remote", "push", "ROOT", "latest"], 2, "ConfigError"),
        (["remote", "push", "ROOT", "latest", "nowhere"], 2, "ConfigError"),
        (["show", "ROOT", "latest~9"], 1, "CommitError"),
        (["show", "ROOT", "forty"], 2, "ConfigError"),
        (["show", "ROOT"], 2, "UsageError"),
        (["ls", "ROOT", "--no-such-option"], 2, "UsageError"),
        (["lss", "ROOT"], 2, "UsageError"),
        (["verify", "ROOT", "--sample", "much"], 2, "ConfigError"),
        (["prune", "ROOT", "--keep-quarantine", "best=1:reward:max", "--yes"], 2, "ConfigError"),
        (["verify", "ROOT", 5], 3, ""),
        (["status"], 3, ""),
        pytest.param(["doctor"], 3, "", marks=WITH_THE_STACK),
        (["retry", "ROOT", 30], 1, "SaveError"),
        pytest.param(["deploy"], 4, "PrefectApiError", marks=WITH_THE_STACK),
        pytest.param(["ls", "s3://127.0.0.1:9"], 4, "RemoteError", marks=WITH_THE_STACK),
    ],
)  # fmt: skip
def test_exit_codes_say_what_happened(
    root: Path, arguments: list[object], code: int, error: str
) -> None:
    words = [root if each == "ROOT" else each for each in arguments]
    aws = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    aws |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
    done = invoke(*words, "-o", "json", env=aws)
    assert done.exit_code == code, done.stderr
    if error:
        body = json.loads(done.stderr)["error"]
        assert (list(body), body["type"]) == (["type", "message", "hint"], error)
        text = invoke(*words, env=aws).stderr.splitlines()
        assert text[0].startswith("error: ")
        assert [line.partition(":")[0] for line in text[1:]] == ["hint"] * bool(body["hint"])


def test_latest_names_the_newest_checkpoint_and_those_before_it(root: Path) -> None:
    for name, step in (("latest", 30), ("latest~1", 20), ("latest~2", 10), ("best", 20)):
        done = invoke("show", root, name)
        assert (done.exit_code, f"step {step} of run" in done.stdout) == (0, True)
    open_run(root, "first", 0)
    open_run(root, "second", 20, resumed_run=1)
    assert invoke("show", root, "latest").stdout.startswith("step 30 ")
    commit_files(root, 25, run=2)  # supersedes step 30
    for name, step in (("latest", 25), ("latest~1", 20), ("latest~2", 10)):
        assert invoke("show", root, name).stdout.startswith(f"step {step} ")


def complete(*words: object, **more: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(map(str, ["trinity-sync", *words]))
    variables = {"_TRINITY_SYNC_COMPLETE": "complete_bash", "COMP_WORDS": line}
    variables |= {"COMP_CWORD": str(len(words))} | more
    done = CliRunner().invoke(app, env=variables, prog_name="trinity-sync")
    assert "error" not in done.stderr + done.stdout
    return done.stdout.split()


def test_the_shell_completes_roots_steps_and_tags(root: Path, home: Path, elsewhere: Path) -> None:
    register_root(home, root)
    (elsewhere / "ckpts-here").mkdir()
    assert complete("ls", str(root)[:-1]) == [str(root)]
    assert complete("ls", "ck") == ["ckpts-here"]
    assert complete("show", root, "") == ["latest", "best", "30", "25", "20", "10", "5"]
    assert complete("show", root, "2") == ["25", "20"]
    assert complete("unpin", root, "b") == ["best"]
    assert complete("jobs", "set", root, "kee") == [
        "keep=",
        "keep_weights=",
        "keep_quarantine=",
        "keep_model=",
    ]
    assert complete("show", "") == [str(root), "ckpts-here"]
    assert complete("ls", "../else") == ["../elsewhere"]
    assert "--keep" in complete("prune", "--")
    assert complete("show", "ck", TRINITY_SYNC_SLOTS="9") == ["ckpts-here"]


def test_the_root_may_be_a_url_and_not_the_folder_of_a_step(
    elsewhere: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_files(elsewhere / "store", 7)
    done = invoke("ls", f"file://{elsewhere}/store")
    assert (done.exit_code, done.stdout.startswith("7\t")) == (0, True), done.stderr
    refused = invoke("prune", "s3://bucket/job", "--yes")
    assert (refused.exit_code, "s3://bucket/job" in refused.stderr) == (2, True), refused.stderr
    for words in (["ls"], ["prune", "--yes"], ["show", 20]):
        refused = invoke(words[0], root / "global_step_20", *words[1:])
        assert (refused.exit_code, f"pass the root: {root}\n" in refused.stderr) == (2, True)
    monkeypatch.chdir(root / "global_step_20")
    assert invoke("show", "..", 20).stdout.startswith("step 20 ")
    assert invoke("show", 20).exit_code == 2  # no root is guessed


def test_the_settings_of_a_job_are_set_shown_and_restored(root: Path, tmp_path: Path) -> None:
    assert "keep\tall\tall\tdefault" in invoke("jobs", "set", root).stdout
    assert not (root / ".trinity_sync/job.json").exists()
    new = tmp_path / "new"
    assert invoke("jobs", "set", new).exit_code == 2  # which shows those of a root
    assert not new.exists()
    made = invoke("jobs", "set", new, "keep=last=3", "remote=file:///copies/job")
    assert (made.exit_code, f"created {new}" in made.stderr) == (0, True)
    assert "keep\tlast=3\tall\tjob" in made.stdout
    assert read_job_settings(new) == JobSettings(keep="last=3", remote="file:///copies/job")
    for wrong in ("keep=most", "kepe=3", "keep", "rank_timeout_s=soon"):
        assert invoke("jobs", "set", new, wrong).exit_code == 2
    assert invoke("jobs", "set", new, "keep=", "remote=").exit_code == 0
    assert read_job_settings(new) == JobSettings()


@pytest.mark.parametrize(
    "line", ["status", "status -o json", "ui --no-open", "report ROOT -o json", "reconcile ROOT"]
)
def test_a_command_ends_though_a_server_is_silent_and_shows_no_password(
    job: Job, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(prefect_connection, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}/api"
        words = line.replace("ROOT", str(job.root)).split()
        done = invoke(*words, env={"PREFECT_API_URL": url})
    assert done.exit_code in (0, 3, 4), done.output
    assert "secret" not in done.output


def test_a_repair_that_could_not_be_made_is_an_exit_code(root: Path) -> None:
    assert invoke("reconcile", root).exit_code == 0
    (lock := root / ".trinity_sync/commit.lock").unlink(missing_ok=True)
    lock.mkdir()  # not even root can open it
    done = invoke("reconcile", root)
    assert (done.exit_code, "failed\trepair latest pointers" in done.stdout) == (3, True)


def test_a_full_disk_is_told_with_what_to_do(small_disk: Path) -> None:
    commit_files(root := small_disk / "ckpts", 20)
    assert invoke("pin", root, 20).exit_code == 0
    with suppress(OSError), (small_disk / "all").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    done = invoke("metrics", root, 20, "reward=1")
    assert (done.exit_code, "No space left on device" in done.stderr) == (2, True)
    done = invoke("jobs", "set", root, "keep=last=2")
    assert done.exit_code == 1
    refused = f"{root / '.trinity_sync'} cannot be opened or written: No space left on device"
    assert refused in done.stderr
    assert "hint: run the command as a user who may write there, or free space" in done.stderr


def test_a_terminal_shows_a_bar_next_to_the_output_and_a_pipe_gets_the_output_alone(
    root: Path, tmp_path: Path
) -> None:
    code, shown = at_a_terminal("verify", root, 20, columns=500)  # no path is broken
    assert (code, "reading" in shown, "bytes" in shown) == (0, True, True)
    line = [sys.executable, "-m", "trinity_sync", "verify", str(root), "20"]
    piped = subprocess.run(line, capture_output=True, text=True, check=True)
    assert (piped.stderr, "reading" in piped.stdout) == ("", False)
    assert all(word in shown for word in piped.stdout.split()[:2])
    (tmp_path / "file").touch()  # an error before the first byte
    code, shown = at_a_terminal(
        "remote", "push", root, 20, f"file://{tmp_path}/file/store", columns=500
    )
    assert (code, shown.startswith("error: "), "uploading" in shown) == (4, True, False)


def test_ctrl_c_during_the_imports_is_no_traceback() -> None:
    script = """
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "trinity_sync.cli.commands":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from trinity_sync.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_logs_are_followed_before_they_exist_and_end_as_their_pipe_is_closed(home: Path) -> None:
    command = [sys.executable, "-m", "trinity_sync", "logs", "worker", "-f"]
    logs = home / "logs"
    logs.mkdir(parents=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tail:
        try:
            assert "worker.log" in tail.stderr.readline()  # there is no such file
            (logs / "worker.log").write_text("started\n")
            assert tail.stdout.readline() == "started\n"
        finally:
            tail.kill()
    (logs / "worker.log").write_text("a line\n" * 100_000)
    command = [sys.executable, "-m", "trinity_sync", "logs", "worker", "-n", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail:
        assert tail.stdout.readline()
        tail.stdout.close()
        assert tail.stderr.read() == b""  # of tail: write error: Broken pipe
        assert tail.wait(250) == -signal.SIGPIPE


@pytest.mark.parametrize("command", ["ls {} >&-", "verify {} 10 2>&-", "ls {}/none <&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_ends_as_with_them(root: Path, command: str) -> None:
    main = f"{sys.executable} -c 'from trinity_sync.cli import main; main()'"
    done = subprocess.run(f"exec {main} {command.format(root)}", shell=True, timeout=250)
    assert done.returncode == (2 if "none" in command else 0)
