"""The cut of a step: a trainer asks the other roles of a checkpoint for their state of the step.

Request and answers are small files in the root, which all nodes share. They are worthless after a
crash and not synced::

    root/.trinity_sync/cuts/request.json    the trainer's newest request
    root/.trinity_sync/cuts/{role}.json     the role's newest answer
    root/.trinity_sync/cuts/{role}.lock     held by the role's process while it lives

A role answers once its state is submitted, so from then on the state survives its process. The
trainer removes its request when it no longer waits: a later state is not that of the step.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import SaveError, SaveTimeoutError
from trinity_sync.fs.atomic import (
    ReadOnChange,
    lengthen_pauses,
    make_folder,
    read_uncached,
    remove_file,
    replace_file,
)
from trinity_sync.fs.locks import acquire_file_lock, try_acquire_file_lock
from trinity_sync.fs.process import describe_this_process
from trinity_sync.fs.records import Count, R, Record, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER

logger = logging.getLogger(__name__)

TAKEN_S = 30.0
"""Seconds to wait for the process that had the role before, which may be ending."""
ANSWER_PAUSE_S, REQUEST_PAUSE_S = 0.01, 0.05
"""Longest pauses between two looks for an answer, for which the training waits, and for a request,
for which a role may wait all the time."""
WARN_S = 5.0
"""Seconds after which a cut that waits names the roles that it waits for."""


@dataclass(frozen=True)
class CutRequest(Record):
    """What a trainer asks for."""

    name: str
    """Random, so that a step is asked for again after a failure."""
    run_key: str
    step: Count


@dataclass(frozen=True)
class CutAnswer(Record):
    """What a role has said; a role that has just started has answered no request."""

    run_key: str
    process: str
    request: str = ""
    error: str = ""


def ask_roles(root: Path, run_key: str, step: int, roles: Sequence[str], timeout_s: float) -> None:
    """Ask the other roles of a run for their state of a step, and wait until all have answered.

    Raises:
        SaveError: a role has failed, or its process has died.
        SaveTimeoutError: a role has not answered within ``timeout_s``.
    """
    request = CutRequest(uuid.uuid4().hex, run_key, step)
    make_folder(folder := _folder(root))
    replace_file(path := folder / "request.json", encode_record(request), sync=False)
    try:
        _await_answers(root, request, roles, timeout_s)
    finally:
        with suppress(OSError):
            if read_record(CutRequest, path, read_uncached) == request:
                remove_file(path)


def _await_answers(root: Path, request: CutRequest, roles: Sequence[str], timeout_s: float) -> None:
    folder, run_key, step = _folder(root), request.run_key, request.step
    answers = {role: _watch(folder / f"{role}.json", CutAnswer) for role in roles}
    began, pauses, said = time.monotonic(), lengthen_pauses(ANSWER_PAUSE_S), False
    while True:
        read = {role: answer.get() for role, answer in answers.items()}
        found = {r: each if each and each.run_key == run_key else None for r, each in read.items()}
        missing = [r for r, answer in found.items() if not answer or answer.request != request.name]
        for role, answer in found.items():
            if answer and role in missing and _has_died(folder, role):
                raise SaveError(
                    f"step {step} of {root} is not cut: the process of role {role} has died: "
                    f"{answer.process}. Start this run again: it resumes from the newest step."
                )
            if answer and role not in missing and answer.error:
                raise SaveError(
                    f"step {step} of {root} is not cut: role {role} could not be saved: "
                    f"{answer.error}"
                )
        if not missing:
            return
        waited = time.monotonic() - began
        names = ", ".join(r if found[r] else f"{r}, which has not started" for r in missing)
        if waited >= timeout_s:
            raise SaveTimeoutError(
                f"step {step} of {root} is not cut: no state within {timeout_s:g} s of role "
                f"{names}. Do its processes call wait_cut, and have they the run's key?"
            )
        if waited >= WARN_S and not said:
            said = True
            logger.warning("Step %d of %s waits for the state of role %s", step, root, names)
        time.sleep(next(pauses))


class CutMember:
    """What one role of a run sees of the cuts; it shows that the role's process lives.

    Raises:
        LockTimeoutError: another living process has the role.
    """

    def __init__(self, root: Path, run_key: str, role: str) -> None:
        self._folder, self._run_key, self._role = _folder(root), run_key, role
        self._request = _watch(self._folder / "request.json", CutRequest)
        self._answered, self._asked = "", -1
        self._lock = ExitStack()
        lock = acquire_file_lock(_lock_path(self._folder, role), limit_s=TAKEN_S)
        self._lock.enter_context(lock)
        self._say("")

    def wait(self, timeout_s: float) -> int | None:
        """Return the step of a request that was not answered yet; None if there is none in time."""
        deadline, pauses = time.monotonic() + timeout_s, lengthen_pauses(REQUEST_PAUSE_S)
        while True:
            with suppress(OSError):  # the trainer tells that there is no answer
                if request := self._find_request():
                    self._asked = request.step
                    return request.step
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, next(pauses)))

    def require_awaited(self, step: int) -> None:
        """Require that the trainer still waits for a step that `wait` has returned.

        Raises:
            SaveError: it does not.
        """
        request = self._find_request()
        if step == self._asked and (request is None or request.step != step):
            raise SaveError(
                f"step {step}, role {self._role}: not saved, because the trainer no longer waits "
                "for this role, whose state is that of a later moment. Call wait_cut more often, "
                "or raise the timeout_s of the trainer's cut."
            )

    def answer(self, step: int, error: str = "") -> None:
        """Tell the trainer that the state of a step was submitted, or why it was not."""
        with suppress(OSError):  # as in `wait`
            request = self._find_request()
            if request and request.step == step:
                self._answered, self._asked = request.name, -1
                self._say(request.name, error)

    def close(self) -> None:
        """Show no longer that the process lives."""
        self._lock.close()

    def _find_request(self) -> CutRequest | None:
        request = self._request.get()
        is_new = request and request.run_key == self._run_key and request.name != self._answered
        return request if is_new else None

    def _say(self, request: str, error: str = "") -> None:
        answer = CutAnswer(self._run_key, describe_this_process(), request, error)
        replace_file(self._folder / f"{self._role}.json", encode_record(answer), sync=False)


def _watch(path: Path, kind: type[R]) -> ReadOnChange[R | None]:
    return ReadOnChange(path, lambda: read_record(kind, path, read_uncached))


def _has_died(folder: Path, role: str) -> bool:
    with try_acquire_file_lock(_lock_path(folder, role)) as is_free:
        return is_free


def _lock_path(folder: Path, role: str) -> Path:
    return folder / f"{role}.lock"


def _folder(root: Path) -> Path:
    return root / PRIVATE_FOLDER / "cuts"
