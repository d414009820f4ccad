"""Settings: where a value comes from, and what is said of a wrong value."""

import os
import socket
from pathlib import Path

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import TRUSTED
from trinity_sync.settings import CONFIG, Settings, StackSettings, default_home


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stack's file, which the environment names."""
    path = tmp_path / "trinity_sync.toml"
    path.touch()
    for name in [name for name in os.environ if name.startswith("TRINITY_SYNC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(CONFIG, str(path))
    return path


def test_a_variable_goes_before_the_file_and_the_file_before_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        '[server]\nport = 5000\nhost = "10.0.0.4"\n[worker]\nheartbeat_timeout = "3m"\n'
    )
    monkeypatch.setenv("TRINITY_SYNC_STACK__SERVER__PORT", "6000")
    found = StackSettings()
    assert (found.server.port, found.server.host) == (6000, "10.0.0.4")
    assert found.worker.heartbeat_timeout.total_seconds() == 180
    assert found.server.keep_events.total_seconds() == 6 * 3600
    assert StackSettings(server={"port": 7000}).server.host == "10.0.0.4"


def test_the_file_of_the_user_goes_before_that_of_the_machine(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert StackSettings().server.port == 4200
    own = tmp_path / "config/trinity_sync/trinity_sync.toml"
    own.parent.mkdir(parents=True)
    own.write_text("[server]\nport = 5000\n")
    assert StackSettings().server.port == 5000


def test_a_list_is_a_list_in_the_file_and_has_colons_in_a_variable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[worker]\nallowed_paths = ["/a"]\n')
    assert StackSettings().worker.allowed_paths == (Path("/a"),)
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__ALLOWED_PATHS", "/a:/b")
    assert StackSettings().worker.allowed_paths == (Path("/a"), Path("/b"))


def test_paths_in_variables_stay_the_same_after_a_change_of_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for name, path in (("SPOOL", "spool"), ("HOME", "~/stack"), ("TRUSTED_PATHS", "data:~/own")):
        monkeypatch.setenv(f"TRINITY_SYNC_{name}", path)
    monkeypatch.setenv(CONFIG, file.name)
    file.write_text("[server]\nport = 5000\n")
    found = Settings()
    assert (found.spool, found.home) == (tmp_path / "spool", Path("/home/me/stack"))
    assert found.trusted_paths == (tmp_path / "data", Path("/home/me/own"))
    monkeypatch.chdir("/")
    again = Settings()
    assert (again.spool, again.home, StackSettings().server.port) == (found.spool, found.home, 5000)


MOUNTS = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:30 / /home rw - nfs4 server:/home rw,vers=4.2
"""


def test_a_home_directory_on_the_network_is_not_where_the_stack_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = socket.gethostname()
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/users/me")
    assert default_home(MOUNTS) == Path("/users/me/.local/state/trinity_sync", host)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_home(MOUNTS) == Path(f"/var/tmp/trinity_sync-{os.getuid()}", host)
    monkeypatch.setenv("XDG_STATE_HOME", "/scratch")
    assert default_home(MOUNTS) == Path("/scratch/trinity_sync", host)


WRONG = {
    "[server]\nprot = 1": r"{file}: unknown key prot in \[server\]; did you mean port\?",
    "[sever]\nport = 1": r"{file}: unknown section \[sever\]; did you mean server\?",
    "[ray]\nxyz = 1": r"unknown key xyz in \[ray\]; known are address, cpus, .*python",
    '[server]\nport = "x"': r"{file}: port = 'x' in \[server\]: .*integer.*; e.g. port = 4200",
    "[server]\nkeep_events = 6": r'keep_events = 6 in \[server\]: .*; e.g. keep_events = "6h"',
    '[server]\npassword = "none"\nhost = "10.0.0.4"': r"{file}: \[server\]: .*10\.0\.0\.4 run code",
    '[maintenance]\nverify = "200%"': r"verify = '200%' .*; e.g. verify = \"2%\"",
    '[maintenance]\ntimezone = "CEST"': r"name of a time zone; e.g. timezone = \"Europe/Berlin",
    "[server": r"{file} is not a TOML file: ",
    "server = 1": r"{file}: \[server\]: ",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_file_is_said_with_its_place_and_what_is_right(
    file: Path, text: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=WRONG[text].replace("{file}", str(file))):
        StackSettings()


def test_everything_that_is_wrong_is_said_at_once(file: Path) -> None:
    file.write_text('[server]\nport = "x"\n[io]\nmax = 1\n')
    with pytest.raises(ConfigError) as caught:
        StackSettings()
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_named_and_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG, str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"trinity-sync config init .*none\.toml"):
        StackSettings()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TRINITY_SYNC_SLOTS", "x", r"TRINITY_SYNC_SLOTS=x: .*; e.g. TRINITY_SYNC_SLOTS=2"),
        ("TRINITY_SYNC_STACK__WORKER__METRICS", "9464", r"METRICS=9464: .*=127.0.0.1:9464$"),
        ("TRINITY_SYNC_STACK__SERVER__KEEP_RUNS", "1", r"KEEP_RUNS=1: .*unit.*KEEP_RUNS=30d$"),
    ],
)
def test_a_wrong_variable_is_named_with_an_example(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        _ = Settings(), StackSettings()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TRINITY_SYNC_SLOT", "TRINITY_SYNC_SLOTS"),
        ("TRINITY_SYNC_RUN", "TRINITY_SYNC_RUN_KEY"),
        ("TRINITY_SYNC_STACK__WORKER__METRICS_PORT", "TRINITY_SYNC_STACK__WORKER__METRICS"),
        ("TRINITY_SYNC_RAY_ADDRESS", "TRINITY_SYNC_STACK__RAY__ADDRESS"),
        ("TRINITY_SYNC_STACK__SERVER__PROT", "TRINITY_SYNC_STACK__SERVER__PORT"),
        ("TRINITY_SYNC_STACK__SEVER__PORT", "TRINITY_SYNC_STACK__SERVER__PORT"),
    ],
)
def test_a_variable_that_means_nothing_is_an_error_with_the_nearest_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    monkeypatch.setenv(name, "1")
    for settings in (Settings, StackSettings):
        with pytest.raises(ConfigError, match=rf"{name} is unknown; did you mean {nearest}\?"):
            settings()


def test_variables_of_a_service_of_kubernetes_are_no_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "TRINITY_SYNC_HEAD_SVC_SERVICE_HOST",
        "TRINITY_SYNC_HEAD_SVC_SERVICE_PORT",
        "TRINITY_SYNC_HEAD_SVC_SERVICE_PORT_GCS",
        "TRINITY_SYNC_PORT",
        "TRINITY_SYNC_PORT_6379_TCP",
        "TRINITY_SYNC_PORT_6379_TCP_ADDR",
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.4:6379")
    assert Settings().slots == 2


def test_other_variables_of_ours_are_known(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRINITY_SYNC_ROOT", "TRINITY_SYNC_LOG", "TRINITY_SYNC_TRIED"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("TRINITY_SYNC_TRUSTED_PATHS", "/a::/b")
    assert Settings().trusted_paths == (Path("/a"), Path("/b"))
    monkeypatch.setenv("TRINITY_SYNC_TRUSTED_PATHS", Settings().to_variables()[TRUSTED])
    assert Settings().trusted_paths == (Path("/a"), Path("/b"))


def test_a_process_that_gets_all_settings_as_variables_reads_no_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        '[server]\nport = 1\nkeep_events = "0s"\nkeep_runs = "90m"\n'
        '[worker]\nallowed_paths = ["/a", "/b"]\nmetrics = "[::]:9464"\n'
        '[io]\nreuse_files = "always"\nmax_mb_per_s = 0.5\n'
        '[maintenance]\nverify = "off"\ntimezone = "UTC"\n'
    )
    settings = StackSettings()
    variables = settings.to_variables()
    file.write_text("[server]\nport = 2\nunknown = 3\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert StackSettings() == settings
