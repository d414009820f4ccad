"""Prove that the services of a stack refuse connections without credentials.

Both protections are those of other programs: Ray's token and the Prefect server's password. A
version that ignores the variable with which it is configured would run without it, and whoever
reaches a service can run code as its user.
"""

import os
import subprocess
import sys

import httpx

from trinity_sync.errors import StackError
from trinity_sync.settings import StackSettings
from trinity_sync.stack.services import StackState

TIMEOUT_S = 30.0
CALL = f"""
import sys, grpc
with grpc.insecure_channel(sys.argv[1], [("grpc.enable_http_proxy", 0)]) as channel:
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout={TIMEOUT_S})
    except grpc.RpcError as error:
        sys.exit(error.code().name)
"""
"""A call to a Ray cluster, with neither a token nor a certificate."""


def require_refusals(stack: StackSettings, state: StackState) -> list[str]:
    """Check that the stack's own server and Ray cluster refuse connections without credentials.

    Return the names of those that refused. A server with the password ``none`` and services that
    the stack did not start are not checked.

    Raises:
        StackError: A service accepts such a connection, or does not answer.
    """
    refused = []
    if state.server and stack.server.password != "none":
        if accepts_requests(state.api_url):
            raise StackError(
                f"the Prefect server at {state.api_url} accepts requests without its password, so "
                "any user of this machine could run code. Run trinity-sync doctor, which names "
                "unsupported packages; install supported ones, and start the stack again"
            )
        refused.append("server")
    if state.ray_auth:
        if accepts_calls(state.ray_address):
            raise StackError(
                f"the Ray cluster at {state.ray_address} accepts connections without its token, so "
                "whoever reaches it could run code as this user. Run trinity-sync down, install "
                '"ray[default]>=2.56" into the environment of the stack, and start it again'
            )
        refused.append("Ray")
    return refused


def accepts_requests(api_url: str) -> bool:
    """Return whether a Prefect server answers a request without credentials.

    Raises:
        StackError: It does not answer at all.
    """
    try:
        answer = httpx.get(f"{api_url}/admin/version", timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise StackError(
            f"cannot check that the Prefect server at {api_url} requires its password: {error!r}. "
            "Look into its log, and start the stack again"
        ) from error
    return answer.status_code not in (401, 403)


def accepts_calls(address: str) -> bool:
    """Return whether a Ray cluster answers a call without a token.

    A process of its own makes the call, so that the caller may fork later, which gRPC does not
    support.

    Raises:
        StackError: It neither answers nor refuses the call.
    """
    try:
        called = subprocess.run(
            [sys.executable, "-c", CALL, address],
            cwd="/",  # not what lies in the caller's folder
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        why = "DEADLINE_EXCEEDED"
    else:
        if not called.returncode:
            return True
        why = (called.stderr.strip().splitlines() or [f"exit code {called.returncode}"])[-1]
    # with TLS, a connection without a certificate of the cluster does not get as far as the token
    if why == "UNAUTHENTICATED" or (why == "UNAVAILABLE" and os.environ.get("RAY_USE_TLS") == "1"):
        return False
    raise StackError(
        f"cannot check that the Ray cluster at {address} requires its token: {why}. Look into its "
        "log, and start the stack again"
    )
