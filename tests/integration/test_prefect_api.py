"""The trainer's calls of Prefect's REST API: to real, guarded and wrong servers."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate

from tests.conftest import environment
from tests.integration.prefect_api import Api, until
from tests.models.chaos.proxy import Proxy
from tests.support.answers import serving
from tests.support.database import lay_tables
from trinity_sync import Settings
from trinity_sync.client import prefect_api
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.prefect_connection import ANSWER_S
from trinity_sync.errors import PrefectApiError, RequestRefusedError
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.stack.daemon import free_port
from trinity_sync.stack.services import StackState

T = TypeVar("T")
LOGIN = "admin:pass"


def ask(
    url: str | None,
    call: Callable[[PrefectApi], Awaitable[T]],
    *,
    home: Path = Path("/no"),
    answer_s: float = ANSWER_S,
    **env: str,
) -> T:
    """What a call returns or raises, with nothing but ``env`` in the environment."""

    async def asked() -> T:
        api = PrefectApi(Settings(home=home), url, answer_s=answer_s)
        try:
            return await call(api)
        finally:
            await api.close()

    with environment(env):
        return asyncio.run(asked())


def login(stack: StackState) -> dict[str, str]:
    """What lets one into the session's server."""
    return {"PREFECT_API_AUTH_STRING": stack.api_auth}


def nothing(api: PrefectApi) -> Awaitable[list[prefect_api.FlowRun]]:
    """A question that every Prefect server answers."""
    return api.read_job_runs("no such job")


def create(request: SaveRequest) -> Callable[[PrefectApi], Awaitable[prefect_api.FlowRun]]:
    return lambda api: api.create_flow_run(request.flow_run)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server that wants a password and, for each change, a CSRF token."""
    home, port = tmp_path_factory.mktemp("guarded"), free_port()
    lay_tables(Settings(home=home))
    own = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_API_AUTH_STRING": LOGIN,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with environment(own), (home / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/api"

    def answers() -> bool:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        assert server.poll() is None, (home / "log").read_text()
        return False

    try:
        until(answers, f"the server at {url}")
        yield url
    finally:
        server.terminate()
        server.wait(250)


@contextmanager
def tls_in_front_of(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """URL with TLS of what listens at a port, and the file of its certificate and authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    valid = (now, now + timedelta(days=1))
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), *valid
    )
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    for extension in (
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
        x509.SubjectAlternativeName([x509.DNSName("localhost")]),
    ):
        made = made.add_extension(extension, critical=False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate = made.sign(key, hashes.SHA256()).public_bytes(pem)
    (folder / "authority.pem").write_bytes(certificate)
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "server.pem").write_bytes(certificate + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    proxy = Proxy(context)
    proxy.target = port
    yield f"https://localhost:{proxy.port}/api", folder / "authority.pem"
    proxy.close()


@pytest.fixture
def hangs() -> Iterator[str]:
    """URL at which something accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield f"http://127.0.0.1:{made.getsockname()[1]}/api"


def test_one_flow_run_is_created_for_an_idempotency_key_by_the_clock_of_the_server(
    stack: StackState, api: Api, root: Path
) -> None:
    request = SaveRequest(root=str(root), step=1, run=1, components=())
    with environment({}):
        before = datetime.now(UTC)
        for _ in range(2):
            ask(stack.api_url, create(request), **login(stack))
    run = api.run_of(request.key)
    assert (run.name, set(run.tags) >= {*request.tags}) == (request.flow_run_name, True)
    assert run.parameters["request"] == request.model_dump(mode="json")
    assert before <= run.expected_start_time <= datetime.now(UTC)


def test_the_flow_runs_of_a_job_are_read_the_newest_first(stack: StackState, root: Path) -> None:
    requests = [SaveRequest(root=str(root), step=step, run=1, components=()) for step in range(3)]

    async def created_and_read(api: PrefectApi) -> list[prefect_api.FlowRun]:
        for request in requests[:2]:
            await api.create_flow_run(request.flow_run)
        return await api.read_job_runs(requests[0].job)

    found = ask(stack.api_url, created_and_read, **login(stack))
    assert [run.key for run in found] == [request.key for request in requests[1::-1]]
    for run in found:
        assert run.state.type in ("SCHEDULED", "PENDING", "RUNNING")
        assert abs(run.state.since - time.time()) < 60
        assert run.page == f"{stack.api_url.removesuffix('/api')}/runs/flow-run/{run.id}"


def test_a_request_that_a_stack_of_another_release_does_not_know_is_refused(
    stack: StackState, root: Path
) -> None:
    fields = SaveRequest(root=str(root), step=1, run=1).flow_run
    fields["parameters"] = {"request": {**fields["parameters"]["request"], "step": "of another"}}
    with pytest.raises(RequestRefusedError, match="run: trinity-sync deploy"):
        ask(stack.api_url, lambda api: api.create_flow_run(fields), **login(stack))


def test_the_password_of_the_local_stack_is_sent_to_its_server_only(
    stack: StackState, stack_settings: Settings, guarded: str
) -> None:
    home = stack_settings.home
    assert ask(stack.api_url, nothing, home=home) == []
    assert ask(None, nothing, home=home, PREFECT_API_URL=stack.api_url) == []
    with pytest.raises(PrefectApiError, match="PREFECT_API_AUTH_STRING"):
        ask(guarded, nothing, home=home)


def test_the_password_is_sent(guarded: str) -> None:
    assert ask(guarded, nothing, PREFECT_API_AUTH_STRING=LOGIN) == []
    basic = json.dumps({"Authorization": "Basic YWRtaW46cGFzcw==", "User-Agent": "ignored"})
    assert ask(guarded, nothing, PREFECT_CLIENT_CUSTOM_HEADERS=basic) == []


@pytest.mark.parametrize(
    "env", [{}, {"PREFECT_API_AUTH_STRING": "admin:wrong"}, {"PREFECT_API_KEY": "pass"}]
)
def test_a_missing_or_wrong_password_is_named(guarded: str, env: dict[str, str]) -> None:
    with pytest.raises(PrefectApiError, match=r"PREFECT_API_AUTH_STRING.*PREFECT_API_KEY") as told:
        ask(guarded, nothing, **env)
    assert told.value.status == 401
    assert "wrong:" not in str(told.value)


def test_a_server_that_wants_a_csrf_token_for_each_change_gets_it(guarded: str, root: Path) -> None:
    request = SaveRequest(root=str(root), step=1, run=1)
    with pytest.raises(PrefectApiError, match="run: trinity-sync deploy"):
        ask(guarded, create(request), PREFECT_API_AUTH_STRING=LOGIN)
    with environment({}), SyncPrefectClient(guarded, auth_string=LOGIN) as client:
        client.create_work_pool(WorkPoolCreate(name="pool", type="process"))
        flow = client.create_flow_from_name("save-step")
        client.create_deployment(flow, "save-step", work_pool_name="pool")
    ask(guarded, create(request), PREFECT_API_AUTH_STRING=LOGIN)
    (run,) = ask(guarded, lambda api: api.read_job_runs(request.job), PREFECT_API_AUTH_STRING=LOGIN)
    assert run.state.type == "SCHEDULED"


def test_a_private_authority_is_trusted_where_it_is_named(
    stack: StackState, tmp_path: Path
) -> None:
    port = int(stack.api_url.removesuffix("/api").rpartition(":")[2])
    with tls_in_front_of(port, tmp_path) as (url, authority):
        named = {"PREFECT_API_SSL_CERT_FILE": str(authority)}
        assert ask(url, nothing, **login(stack), **named) == []
        insecure = {"PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "true"}
        assert ask(url, nothing, **login(stack), **insecure) == []
        with pytest.raises(PrefectApiError, match=r"not trusted.*PREFECT_API_SSL_CERT_FILE"):
            ask(url, nothing)
        with pytest.raises(PrefectApiError, match="or SSL_CERT_FILE, names /no/file"):
            ask(url, nothing, PREFECT_API_SSL_CERT_FILE="/no/file")


@pytest.mark.parametrize("path", ["", "/"])
def test_a_url_without_api_is_named(stack: StackState, root: Path, path: str) -> None:
    url = stack.api_url.removesuffix("/api") + path
    for call in (nothing, create(SaveRequest(root=str(root), step=1, run=1))):
        with pytest.raises(PrefectApiError, match="it ends with /api"):
            ask(url, call)


def test_another_server_at_the_port_is_named() -> None:
    with serving(lambda *_: (200, "<html>")) as page, socket.socket() as other:
        with pytest.raises(PrefectApiError, match="not the API of a Prefect server"):
            ask(f"{page.replace('://', '://user:secret@')}/api", nothing)
        other.bind(("127.0.0.1", 0))
        other.listen()

        def speak() -> None:
            with suppress(OSError):
                while True:
                    other.accept()[0].sendall(b"\0\0\x18\x04\r\n\r\n")

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(PrefectApiError, match="not the API of a Prefect server"):
            ask(f"http://127.0.0.1:{other.getsockname()[1]}/api", nothing)
        other.shutdown(socket.SHUT_RDWR)  # ends the thread


NOT_THERE = "no Prefect server can be reached at http://"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:9/api", f"{NOT_THERE}127.0.0.1:9/api"),
        ("http://no-such-host.invalid/api", f"{NOT_THERE}no-such-host.invalid/api"),
        ("http://user:secret@127.0.0.1:9/api", "127.0.0.1:9"),
        ("http://user:a/secret@127.0.0.1:9/api", "127.0.0.1:9"),
        ("http://user:an@secret@127.0.0.1:9/api", "127.0.0.1:9"),
        ("127.0.0.1:4200/api", "^127.0.0.1:4200/api is not the API of a Prefect server"),
        ("ftp://here/api", "^ftp://here/api is not the API of a Prefect server"),
    ],
)
def test_a_url_of_no_server_is_named_without_its_password(url: str, told: str) -> None:
    with pytest.raises(PrefectApiError, match=told) as caught:
        ask(url, nothing)
    assert "secret" not in str(caught.value)


def test_a_server_that_hangs_is_given_up(hangs: str) -> None:
    with pytest.raises(PrefectApiError, match=f"{hangs} does not answer within 0.2 s"):
        ask(hangs, nothing, answer_s=0.2)


def test_a_busy_server_is_asked_again_at_once() -> None:
    """What SQLite makes of two writes that meet: it cannot be had from a real server on demand."""
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _: str) -> tuple[int, str]:
        asked.append(request.path)
        return (503 if len(asked) < 3 else 200), "[]"

    with serving(answer) as url:
        assert ask(f"{url}/api", nothing) == []
    assert asked == ["/api/flow_runs/filter"] * 3


def test_the_local_stack_is_found_by_its_state_file(guarded: str, tmp_path: Path) -> None:
    state = tmp_path / "stack.json"
    with pytest.raises(PrefectApiError, match=f"no Prefect server is known.*{state}"):
        ask(None, nothing, home=tmp_path)
    state.write_text(json.dumps({"api_url": guarded, "api_auth": LOGIN}))
    state.chmod(0o600)
    assert ask(None, nothing, home=tmp_path) == []
    assert (
        ask(None, nothing, home=Path("/no"), PREFECT_API_URL=guarded, PREFECT_API_AUTH_STRING=LOGIN)
        == []
    )
    state.chmod(0o622)
    with pytest.raises(PrefectApiError, match="others may write it"):
        ask(None, nothing, home=tmp_path)
    state.chmod(0o600)
    state.write_text("{")
    with pytest.raises(PrefectApiError, match="cannot be read"):
        ask(None, nothing, home=tmp_path)


def test_a_server_that_has_moved_is_found_at_the_next_call(
    guarded: str, stack: StackState, tmp_path: Path
) -> None:
    state = tmp_path / "stack.json"
    state.touch(mode=0o600)

    async def asked(api: PrefectApi) -> None:
        state.write_text(json.dumps({"api_url": "http://127.0.0.1:9/api"}))
        with pytest.raises(PrefectApiError, match="no Prefect server can be reached"):
            await nothing(api)
        state.write_text(json.dumps({"api_url": stack.api_url, "api_auth": stack.api_auth}))
        assert await nothing(api) == []

    ask(None, asked, home=tmp_path)
