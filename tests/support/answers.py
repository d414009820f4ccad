"""HTTP servers in this process, for answers that a real server never gives, or gives elsewhere."""

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler, str], tuple[int, str]]
"""Takes a request (``command``, ``path``, ``headers``) and its body; returns status and text."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """URL of a server that answers GET and POST with ``answer``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
            status, text = answer(self, body)
            self.send_response(status)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


@contextmanager
def server(
    answers: dict[str, tuple[int, str]], login: str = "", asked: list[tuple[str, str]] | None = None
) -> Iterator[str]:
    """URL of a Prefect server that answers by a path's beginning, with status and body, or 404.

    A server with a ``login`` (``name:password``) requires it, except for the path ``/health``.
    The path and the body of each request are appended to ``asked``.
    """
    token = f"Basic {base64.b64encode(login.encode()).decode()}"

    def answer(request: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
        if asked is not None:
            asked.append((request.path.removeprefix("/api"), body))
        is_open = not login or request.path == "/api/health"
        if not is_open and request.headers.get("authorization") != token:
            return 401, '{"exception_message": "Unauthorized"}'
        known = [answers[path] for path in answers if request.path.startswith(f"/api{path}")]
        return known[0] if known else (404, "{}")

    with serving(answer) as url:
        yield f"{url}/api"
