"""Find and call a Prefect server; `prefect_api` has the calls.

Importing Prefect would cost each trainer and command 2 CPU seconds and 70 MB, and Prefect cannot be
installed next to vLLM. httpx is imported by the thread that makes the first call.

The server, the password and the certificates come from the variables that Prefect's own client
reads, with the same meaning. Unlike Prefect's client, this one follows no redirect to another host,
uses no proxy for this node and reads no profiles. Without ``PREFECT_API_URL``, the state file of
this user's local stack names the server.
"""

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from trinity_sync.errors import PrefectApiError, RequestRefusedError, TrinitySyncError
from trinity_sync.fs.atomic import is_own
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT
from trinity_sync.settings import Settings

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
C = TypeVar("C", bound="PrefectConnection")
STACK_FILE = "stack.json"
"""State file of the local stack, in ``settings.home``."""
CONNECT_S = 5.0
"""Seconds to wait for a connection: a host that is up accepts it within a round trip."""
ANSWER_S = 20.0
"""Seconds to wait for an answer. A busy server on SQLite takes a second or two. A server that takes
longer may still create the flow run; the next attempt finds it by its idempotency key."""
BUSY_WAITS_S = 0.01, 0.02, 0.05, 0.1, 0.2
"""Seconds between attempts while the server answers 503: on SQLite two writes collided, and the
database is free again milliseconds later."""
KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is reused; uvicorn closes it after five."""

_PROTECTED = {"user-agent", "prefect-csrf-token", "prefect-csrf-client"}
"""Headers that ``PREFECT_CLIENT_CUSTOM_HEADERS`` cannot set, as in Prefect."""

_THIS_NODE = "localhost", "127.0.0.1", "[::1]"
_NO_PROXY = "no_proxy", "NO_PROXY"


@dataclass(frozen=True)
class Server:
    """URL of the API, and how to connect to it."""

    url: str
    login: str
    """``user:password``; empty for a server without a password, and for a key."""
    headers: tuple[tuple[str, str], ...]
    cert_file: str
    verifies: bool
    is_own: bool = False
    """Whether it is the server of this user's local stack, which is reached without a proxy."""

    @property
    def identity(self) -> str:
        """What tells two servers apart on this node."""
        return _normalize(self.ui_url)

    @property
    def ui_url(self) -> str:
        """URL of the Prefect UI, without the user and the password in it."""
        return hide_password(self.url).rstrip("/").removesuffix("/api")


class PrefectConnection:
    """The connection to a Prefect server; an instance belongs to one event loop at a time.

    The URL, which ends with ``/api``, is by default ``PREFECT_API_URL`` or that of the local stack,
    whose state file is in ``settings.home``. It is looked up before each call, so a server that
    restarts on another port is found. An answer is awaited for ``answer_s``, by default `ANSWER_S`.
    """

    def __init__(
        self, settings: Settings, api_url: str | None = None, *, answer_s: float | None = None
    ) -> None:
        self._home = settings.home
        self._given_url = api_url
        self._answer_s = answer_s or ANSWER_S
        self._client: httpx.AsyncClient | None = None
        self._connected_to: Server | None = None
        self._deployments: dict[str, str] = {}
        """Identifiers of the server's deployments that are known, by name."""
        self._csrf_client = str(uuid.uuid4())
        self.clock_skew = 0.0
        """Seconds by which the server's clock is ahead of this node's, by its last answer."""

    def find_server(self) -> Server:
        """Return the server that the environment or the local stack's state file names; no call.

        Raises:
            PrefectApiError: neither does; the message says where it was looked for.
        """
        return find_server(self._home, self._given_url)

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        client, self._client, self._connected_to = self._client, None, None
        self._deployments.clear()
        if client is not None:
            await client.aclose()

    async def call(
        self, path: str, decode: Callable[[Any], T], body: Mapping[str, Any] | None = None
    ) -> T:
        """Send a request, with POST if it has a body; return what ``decode`` makes of the answer.

        Raises:
            RequestRefusedError: the server will never accept the request.
            PrefectApiError: the server does not answer as it should; the message says what to do.
        """
        server = self.find_server()
        if server.is_own and server.login and (user := find_other_user(server.url)):
            raise PrefectApiError(
                f"at {hide_password(server.url)}, where the local stack was, a process of user "
                f"{user} listens, which is not told the password. Run: trinity-sync up"
            )
        if server != self._connected_to:
            await self.close()
            self._connected_to = server
        with translate_errors(server, self._answer_s):
            self._client = self._client or _connect(server)
            before = time.time()
            answer = await asyncio.wait_for(
                self._send_until_free(self._client, path, body), self._answer_s
            )
            answer.raise_for_status()
            self.clock_skew = compute_clock_skew(answer.headers.get("date"), before, time.time())
            return decode(answer.json() if answer.content else None)

    async def _send_until_free(
        self, client: "httpx.AsyncClient", path: str, body: Mapping[str, Any] | None
    ) -> "httpx.Response":
        """Send a request, and retry while the server is busy; requests may safely be repeated."""
        import httpx

        method = "GET" if body is None else "POST"

        async def send() -> httpx.Response:
            answer = await client.request(method, path, json=body)
            if answer.status_code == 403 and "CSRF" in answer.text:
                # the token is missing or has expired; most servers need none
                token = await client.get("/csrf-token", params={"client": self._csrf_client})
                token.raise_for_status()
                client.headers["Prefect-Csrf-Token"] = token.json()["token"]
                client.headers["Prefect-Csrf-Client"] = self._csrf_client
                answer = await client.request(method, path, json=body)
            return answer

        for wait_s in BUSY_WAITS_S:
            # an idle connection that the server was just closing
            with suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                answer = await send()
                if answer.status_code != 503 or "retry-after" in answer.headers:
                    return answer
            await asyncio.sleep(wait_s)
        return await send()


def find_other_user(url: str) -> int:
    """Return another user of this node, not root, whose process listens at a URL; 0 for none."""
    parsed = urlsplit(_normalize(url))
    with suppress(OSError, ValueError, TypeError):  # a name instead of an address
        address = int.from_bytes(socket.inet_aton(str(parsed.hostname)), sys.byteorder)
        hosts = (address, 0) if str(parsed.hostname).startswith("127.") else (address,)
        ends = tuple(f"{each:08X}:{parsed.port:04X}".encode() for each in hosts)
        for table in ("tcp", "tcp6"):
            # what listens comes first; the kernel takes 7 ms of CPU for all, at each connection
            with Path(f"/proc/net/{table}").open("rb", buffering=300) as rows:
                next(rows)
                for fields in map(bytes.split, rows):
                    if fields[3] != b"0A":
                        break
                    if fields[1].endswith(ends):
                        return 0 if int(fields[7]) == os.getuid() else int(fields[7])
    return 0


def refuse_other_users(server: Server) -> None:
    """Have this process connect to no other user at the port of the local stack.

    Prefect's own clients would send it the password.
    """
    port = urlsplit(server.url).port

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        there = event == "socket.connect" and arguments[1][1:2] == (port,)
        if there and (user := find_other_user(server.url)):
            raise ConnectionRefusedError(f"user {user} listens at port {port} of the stack")

    if server.is_own and server.login:
        sys.addaudithook(look)


def compute_clock_skew(date: str | None, before: float, after: float) -> float:
    """Return the seconds by which a server's clock is ahead of this node's; negative if behind.

    ``date`` is the ``Date`` header of a response, truncated to the second. A skew that the
    truncation or the transfer can explain counts as 0, and so does a missing header.
    """
    if not date:
        return 0.0
    theirs = parsedate_to_datetime(date).timestamp()
    return max(theirs - after, 0.0) + min(theirs + 1 - before, 0.0)


@contextmanager
def translate_errors(server: Server, answer_s: float) -> Iterator[None]:
    """Translate the errors of httpx and of answers in another form into `PrefectApiError`."""
    import httpx

    url, cert_file = hide_password(server.url), server.cert_file
    try:
        yield
    except TrinitySyncError:
        raise
    except httpx.HTTPStatusError as error:
        raise _error_of(url, error.response) from error
    except (TimeoutError, httpx.TimeoutException) as error:
        connecting = isinstance(error, httpx.ConnectTimeout)
        raise PrefectApiError(
            f"the Prefect server at {url} does not answer within "
            f"{CONNECT_S if connecting else answer_s:g} s. Look at its log, or correct "
            "PREFECT_API_URL"
        ) from error
    except httpx.ConnectError as error:
        if _is_untrusted(error):
            raise PrefectApiError(
                f"the certificate of the Prefect server at {url} is not trusted ({error}). Set "
                "PREFECT_API_SSL_CERT_FILE to the certificate of the authority that signed it "
                f"(now {cert_file})"
            ) from error
        raise PrefectApiError(
            f"no Prefect server can be reached at {url} ({error}). Start it (trinity-sync up), "
            "or correct PREFECT_API_URL"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        # another protocol, no URL, or an answer of another form
        why = f"{type(error).__name__}: {error}"
        raise PrefectApiError(_describe_other_server(url, why)) from error
    except OSError as error:  # of the certificate file; httpx raises none itself
        raise PrefectApiError(
            f"PREFECT_API_SSL_CERT_FILE, or SSL_CERT_FILE, names {cert_file}, which holds no "
            f"certificates that can be read ({error}). Correct it"
        ) from error


def _error_of(url: str, answer: "httpx.Response") -> PrefectApiError:
    """Return the error for an answer without success, which says what to do."""
    status, kind = answer.status_code, PrefectApiError
    if status in (401, 403):
        text = (
            f"the Prefect server at {url} refuses this client ({status}): the password is missing "
            "or wrong. Set PREFECT_API_AUTH_STRING to the server's PREFECT_SERVER_API_AUTH_STRING "
            "(of a stack on this machine: trinity-sync env prints it), or PREFECT_API_KEY to a key "
            "of Prefect Cloud"
        )
    elif status in (409, 422):
        kind = RequestRefusedError
        text = (
            f"the Prefect server at {url} refuses the request ({status}): {answer.text[:300]}. "
            "Client and stack may be of different releases: install the same one on both sides, "
            "then run: trinity-sync deploy"
        )
    elif status == 404 and "Deployment not found" in answer.text:
        name = answer.request.url.path.partition("/deployments/name/")[2] or SAVE_DEPLOYMENT
        text = f"the Prefect server at {url} has no deployment {name}; run: trinity-sync deploy"
    elif status == 404 and "not found" in answer.text:  # of an unknown path, it is "Not Found"
        text = f"the Prefect server at {url} no longer has what was asked for: {answer.text[:300]}"
    elif status in (404, 405) or 300 <= status < 400:
        text = _describe_other_server(url, f"{status} {answer.reason_phrase}")
    else:
        text = (
            f"the Prefect server at {url} answers {status} {answer.reason_phrase}: "
            f"{answer.text[:300]}. Look at its log"
        )
    return kind(text, status=status)


def _describe_other_server(url: str, why: str) -> str:
    return (
        f"{url} is not the API of a Prefect server ({why}). Correct PREFECT_API_URL; it ends with "
        "/api"
    )


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


async def _refuse_other_hosts(answer: "httpx.Response") -> None:
    """Raise at a redirect to another host, which would receive secrets in custom headers."""
    if answer.has_redirect_location:
        there = answer.url.join(answer.headers["location"])
        if there.host != answer.url.host:
            answer.raise_for_status()


@lru_cache(maxsize=4)
def _trust(cert_file: str, verifies: bool) -> ssl.SSLContext:
    """Return the context of a client; reading all authorities takes 40 ms."""
    context = ssl.create_default_context(cafile=cert_file if verifies else None)
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _connect(server: Server) -> "httpx.AsyncClient":
    import httpx

    direct = [f"all://{host}" for host in _THIS_NODE]  # no proxy, whatever NO_PROXY says
    if server.is_own and (host := find_host(server.url)):
        direct.append(f"all://{host}")
    return httpx.AsyncClient(
        base_url=server.url,
        headers=dict(server.headers),
        verify=_trust(server.cert_file, server.verifies),
        follow_redirects=True,
        event_hooks={"response": [_refuse_other_hosts]},
        mounts=dict.fromkeys(direct),
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
    )


def find_server(home: Path, given_url: str | None = None) -> Server:
    """Return the server that is named now; ``home`` is `Settings.home`.

    Raises:
        PrefectApiError: none is named, or a variable is invalid.
    """
    import certifi

    named, is_own = os.environ.get, False
    url, login = given_url or named("PREFECT_API_URL", ""), named("PREFECT_API_AUTH_STRING", "")
    prefers_own = given_url or not (url and (login or named("PREFECT_API_KEY")))
    with nullcontext() if not url else suppress(PrefectApiError):  # it may not be needed
        own_url, own_login = read_local_stack(home)
        url = url or own_url
        is_own = bool(url) and _normalize(url) == _normalize(own_url)
        login = (own_login if is_own and prefers_own else "") or login
    if not url:
        raise PrefectApiError(
            "no Prefect server is known: PREFECT_API_URL is not set, and "
            f"{home / STACK_FILE} names none. Set PREFECT_API_URL, or run: trinity-sync up"
        )
    headers = {"user-agent": "trinity-sync"}
    if login:
        headers["authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    elif key := named("PREFECT_API_KEY", ""):
        headers["authorization"] = f"Bearer {key}"
    try:
        custom = json.loads(named("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}")
        custom = {str(name).lower(): str(value) for name, value in custom.items()}
    except (ValueError, AttributeError) as error:
        raise PrefectApiError(
            "PREFECT_CLIENT_CUSTOM_HEADERS is not a JSON object of names and values; correct it"
        ) from error
    headers |= {name: value for name, value in custom.items() if name not in _PROTECTED}
    insecure = named("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower()
    return Server(
        url,
        login,
        tuple(headers.items()),
        named("PREFECT_API_SSL_CERT_FILE") or named("SSL_CERT_FILE") or certifi.where(),
        insecure not in ("1", "true", "t", "yes", "y", "on"),
        is_own,
    )


def find_host(address: str) -> str:
    """Return the host of a URL or ``host:port``; empty for an invalid one."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


def bypass_proxies(variables: MutableMapping[str, str], *addresses: str) -> None:
    """Have other clients reach this node, and URLs or ``host:port``, without a proxy.

    Both spellings of ``NO_PROXY`` get the hosts: some libraries read one, and some the other.
    """
    hosts = [find_host(each) for each in addresses]
    known = ",".join(variables.get(name, "") for name in _NO_PROXY).split(",")
    named = [each.strip() for each in known] + [each.strip("[]") for each in _THIS_NODE]
    value = ",".join(dict.fromkeys(filter(None, [*named, *hosts])))
    variables.update(dict.fromkeys(_NO_PROXY, value))


def hide_password(url: str) -> str:
    """Return a URL, which may be invalid, without the user and the password in it."""
    return re.sub(r"//.*@", "//", url)


def _normalize(url: str) -> str:
    """Return a URL in the form in which two of the same server on this node are equal."""
    return re.sub(r"//(localhost|\[::1\])(?=[:/]|$)", "//127.0.0.1", url.rstrip("/"))


def knows_server(settings: Settings) -> bool:
    """Return whether a variable, or the file of a local stack, names a server."""
    with suppress(PrefectApiError):  # what asks the server is told
        return bool(os.environ.get("PREFECT_API_URL") or read_local_stack(settings.home)[0])
    return True


def read_local_stack(home: Path) -> tuple[str, str]:
    """Return URL and password of the API of this user's local stack; empty if there is none.

    ``home`` is `Settings.home`.

    Raises:
        PrefectApiError: the state file is not trusted or cannot be read.
    """
    path = home / STACK_FILE
    try:
        with path.open("rb") as file:
            if not is_own(file.fileno()):
                raise PrefectApiError(
                    f"state file {path} of the local stack belongs to another user, or others may "
                    "write it, so the server that it names is not asked. Set PREFECT_API_URL, or "
                    "TRINITY_SYNC_HOME to a folder of your own"
                )
            body = json.loads(file.read())
            url, login = str(body.get("api_url") or ""), str(body.get("api_auth") or "")
    except (FileNotFoundError, NotADirectoryError):
        url = login = ""
    except (OSError, ValueError, AttributeError) as error:
        raise PrefectApiError(
            f"state file {path} of the local stack cannot be read ({error}). Set PREFECT_API_URL, "
            "or run: trinity-sync up"
        ) from error
    return url, login
