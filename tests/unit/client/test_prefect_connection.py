"""Which server is called, through what, and what it is told; real servers are in integration."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.answers import server
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.client.prefect_connection import find_server
from trinity_sync.errors import PrefectApiError
from trinity_sync.settings import Settings


def test_a_server_of_this_node_is_asked_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with server({"/flow_runs/filter": (200, "[]")}) as url:
        for name in (url, url.replace("127.0.0.1", "localhost")):
            assert ask_server(Settings(), lambda api: api.read_job_runs("a job"), name) == []


def test_a_redirect_to_another_host_takes_no_secret_along(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_there: list[tuple[str, str]] = []
    host = "localhost"

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(307)
            self.send_header("location", there.replace("127.0.0.1", host))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Secret": "of an access proxy"}')
    with (
        server({"": (200, "[]")}, asked=asked_there) as there,
        ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as made,
    ):
        threading.Thread(target=made.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_port}/api"
        with pytest.raises(PrefectApiError, match="307 Temporary Redirect"):
            ask_server(Settings(), lambda api: api.read_job_runs("a job"), url)
        assert not asked_there
        host = "127.0.0.1"
        assert ask_server(Settings(), lambda api: api.read_job_runs("a job"), url) == []
        made.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_local_stack_is_given_its_password_by_whichever_name_it_is_called(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Also where the environment has that of another server."""
    settings.home.mkdir()
    state = {"api_url": "http://127.0.0.1:4200/api", "api_auth": "trinity-sync:secret"}
    (settings.home / "stack.json").write_text(json.dumps(state))
    local, other = f"http://{host}:4200/api/", f"http://{host}:4201/api"
    monkeypatch.setenv("PREFECT_API_URL", local)
    assert "authorization" in dict(find_server(settings.home, None).headers)
    monkeypatch.setenv("PREFECT_API_URL", other)
    assert "authorization" not in dict(find_server(settings.home, None).headers)
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of:another")
    assert find_server(settings.home, local).login == "trinity-sync:secret"
    assert find_server(settings.home, other).login == "of:another"
