"""Read and write the state file and the invitation of a stack.

``home/stack.json`` has the stack's addresses and daemons, for later processes. ``home/join.json``
has what another machine needs to join the stack, including secrets.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from errno import EPERM
from pathlib import Path

from trinity_sync.client.prefect_connection import STACK_FILE
from trinity_sync.errors import StackError
from trinity_sync.fs.atomic import is_own, replace_file
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.settings import LOCAL_HOST, Settings
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import LOCK_FILE, StackState, has_daemons, make_home

INVITATION = "join.json"
"""File name of the invitation, next to the state file."""
INVITATION_FIELDS = ("api_url", "api_auth", "ray_address", "ray_auth")


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold the lock of a stack's home, which is created: one `up` or `down` runs at a time.

    Raises:
        StackError: The home cannot be used.
    """
    try:
        make_home(home)
        with acquire_file_lock(home / LOCK_FILE):
            yield
    except OSError as error:
        raise StackError(
            f"home {home} of the stack cannot be used: {error}. Set TRINITY_SYNC_HOME to a folder "
            "that this user can write."
        ) from error


def read_state(home: Path) -> StackState | None:
    """Read the state of the stack in ``home``; None if there is none.

    It has no daemons if they were of another boot or PID namespace and have ended: pids mean
    nothing there.

    Raises:
        StackError: The file is corrupted, or others than this user may write it.
    """
    path = home / STACK_FILE
    try:
        with path.open("rb") as file:
            if not is_own(file.fileno()):
                raise PermissionError(EPERM, "it is another user's, or others may write it")
            os.fchmod(file.fileno(), 0o600)
            body = json.loads(file.read())
        for name in ("server", "ray", "worker"):
            body[name] = body[name] and Daemon(**body[name])
        state = StackState(**body)
        if state.is_elsewhere and not has_daemons(home):
            here = StackState().namespace
            return replace(state, server=None, ray=None, worker=None, namespace=here)
        return state
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise StackError(
            f"state file {path} cannot be used: {error.strerror}. Use the stack as the user that "
            "started it, or set TRINITY_SYNC_HOME to a folder of your own."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise StackError(
            f"state file {path} is corrupted, or of another release. Run trinity-sync down of that "
            "release, or stop the processes that its logs name by hand and remove it"
        ) from error


def write_state(home: Path, state: StackState) -> None:
    """Write the state of a stack, or remove the file if the state is empty."""
    path = home / STACK_FILE
    if state == StackState():
        path.unlink(missing_ok=True)
        return
    replace_file(path, json.dumps(asdict(state), indent=1), mode=0o600)  # Ray's token may be in it


def write_invitation(settings: Settings, state: StackState) -> None:
    """Write the invitation for `local_stack.join`, if other machines can reach this one."""
    if not state.server or not state.ray or state.host == LOCAL_HOST:
        return
    auth = dict(state.ray_auth or {})
    if path := auth.pop("RAY_AUTH_TOKEN_PATH", ""):
        auth["RAY_AUTH_TOKEN"] = Path(path).read_text().strip()
    body = {name: getattr(state, name) for name in INVITATION_FIELDS} | {"ray_auth": auth}
    replace_file(settings.home / INVITATION, json.dumps(body, indent=1), mode=0o600)


def read_invitation(invitation: Path) -> StackState:
    """Return the stack that an invitation describes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not an invitation.
    """
    body = json.loads(invitation.read_text())
    if not isinstance(body, dict) or body.keys() != {*INVITATION_FIELDS}:
        raise ValueError(f"it does not have {', '.join(INVITATION_FIELDS)} and nothing else")
    return StackState(**body, joined=True)


def read_last_addresses(home: Path) -> StackState:
    """Return the addresses of a stopped stack, which joined machines still use."""
    try:
        last = read_invitation(home / INVITATION)
    except (OSError, ValueError):
        return StackState()
    return StackState(api_url=last.api_url, ray_address=last.ray_address)
