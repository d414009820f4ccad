"""The real saver of a node, whose saves a test drives from one part of a commit to the next.

Its looks, its pipeline and what it writes are those of the product. Each save is a thread that
stops where a part has ended until the test lets it go on, lets the next part fail, or kills the
saver: all its saves end there, and what is on disk is what a killed process leaves.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.prefect_stand_in import FlowRun, Server
from trinity_sync import saver as saver_module
from trinity_sync.client.saver_control import SaverControl, SaveTrigger
from trinity_sync.pipeline.save import PERSIST, Part, SaverDriver, Share
from trinity_sync.saver import Saver, WaitingSave
from trinity_sync.saves.journal import Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.spool import JobSpool, list_job_spools
from trinity_sync.storage.uncommitted import Persisted

T = TypeVar("T")

PART_S = 60.0
"""Seconds after which a part counts as hanging."""


class Killed(BaseException):
    """Ends the threads of a saver that is killed; no part of the product catches it."""


class Attempt(Iterator[str]):
    """One save of the saver; `next` does its next part, and returns what that was."""

    def __init__(self) -> None:
        self._says: queue.Queue[str | BaseException] = queue.Queue()
        self._goes_on: queue.Queue[BaseException | None] = queue.Queue()
        self._lock = threading.Lock()
        self._fails: BaseException | None = None

    def __next__(self) -> str:
        return self.throw(None)

    def throw(self, error: BaseException | None) -> str:
        """Have the next part fail, or do it if there is no error."""
        self._goes_on.put(error)
        said = self._says.get(timeout=PART_S)
        if isinstance(said, BaseException):
            raise said
        return said

    def kill(self) -> None:
        self._goes_on.put(Killed())

    def wait(self) -> None:
        """In the save's thread: wait for what the test decides."""
        self._fails = self._goes_on.get()
        if isinstance(self._fails, Killed):
            raise self._fails

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """In a thread of the save: do a part; components are written one after the other."""
        with self._lock:
            if error := self._fails:
                self._fails = error if isinstance(error, Killed) else None
                raise error
            yield
            self._says.put(what)
            self.wait()

    def end(self, error: Exception) -> None:
        self._says.put(error)


class SteppedSave(SaverDriver):
    """The parts of a save in a thread of the saver, which stops after each."""

    attempt: Attempt
    before_commit: Callable[[SaveRequest], None]

    async def do(self, part: Part) -> None:
        if part is PERSIST:
            return await super().do(part)
        with self.attempt.part(part.name):
            self.before_commit(self.request)  # any part may wait for save functions
            await super().do(part)

    def _persist_share(self, share: Share) -> Persisted:
        with self.attempt.part(f"{share.what} is written"):
            self.before_commit(self.request)
            return super()._persist_share(share)

    def _repeat(self, part: Part, call: Callable[[], T], what: str = "") -> T:
        return call()


class DrivenSaver(Saver):
    """A process of the saver."""

    def __init__(
        self,
        spool: Path,
        attempts: dict[str, Attempt],
        before_commit: Callable[[SaveRequest], None],
    ) -> None:
        super().__init__(spool, StackSettings(worker={"nice": 0}))
        self._before_commit = before_commit
        self._attempts = attempts
        self._threads: list[tuple[threading.Thread, Attempt]] = []
        self._begun: queue.Queue[SaveRequest] = queue.Queue()

    def look(self) -> list[SaveRequest]:
        """Look once at what waits; return the saves that this begins."""
        before = {*self._saves}
        for job in list_job_spools(self._spool):
            if saver_module.read_served(job.folder, self._name) is not None:
                self._look_at(job)
        begun = [self._begun.get(timeout=PART_S) for _ in {*self._saves} - before]
        return sorted(begun, key=lambda each: (each.root, each.run, each.step, each.kind))

    def die(self) -> None:
        """Leave on disk what a killed process leaves."""
        begun = {path: path.read_bytes() for path in self._spool.glob(f"*/*{saver_module.BEGUN}")}
        for thread, attempt in self._threads:
            attempt.kill()
            thread.join(PART_S)
            assert not thread.is_alive()
        for path, content in begun.items():
            with suppress(FileNotFoundError):  # the folder of its job has gone
                path.write_bytes(content)
        for pipe in (self._ended, self._end):
            os.close(pipe)

    def _save(self, save: WaitingSave) -> None:
        request = save.request
        attempt = self._attempts[request.key] = Attempt()
        self._threads.append((threading.current_thread(), attempt))
        self._begun.put(request)
        with suppress(Killed):
            attempt.wait()
            super()._save(save)
            failed = request.key in self._failed
            attempt.end(RuntimeError(read_failure(request)) if failed else StopIteration())

    def _find_save(self, job: JobSpool, request: SaveRequest, starts: int = 0) -> WaitingSave:
        del starts  # a test kills as many as it likes
        return super()._find_save(job, request)

    def _make_driver(self, request: SaveRequest) -> SteppedSave:
        driver = SteppedSave(request, self._stack, self._spool)
        driver.attempt, driver.before_commit = self._attempts[request.key], self._before_commit
        return driver


def read_failure(request: SaveRequest) -> str:
    """Return why a save has failed, as the journal has it."""
    journal = Journal.of(request)
    with suppress(OSError):  # its root has gone
        journal.read()
    entry = journal.find(request.key)
    return entry.message if entry else ""


class Node(Server):
    """The saves of a node as `Server` has its flow runs: what a saver has begun, by key."""

    def __init__(
        self, spool: Path, before_commit: Callable[[SaveRequest], None] = lambda _: None
    ) -> None:
        super().__init__(before_commit)
        self._spool = spool
        self._attempts: dict[str, Attempt] = {}
        self._saver = DrivenSaver(spool, self._attempts, before_commit)
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(saver_module, "PATIENCE_S", 0.0)  # also for a root that has gone

    def begin_due(self) -> list[tuple[FlowRun, Iterator[str]]]:
        """Have the saver look, and begin what is due."""
        begun = []
        for request in self._saver.look():
            run, attempt = self.ask(request), self._attempts[request.key]
            run.attempts.append(attempt)
            if run.state != "completed":
                run.state = "running"
            begun.append((run, attempt))
        return begun

    def begin(self, run: FlowRun) -> Iterator[str] | None:
        """Have the saver look; return its attempt at a save, if it has begun it."""
        self.begin_due()
        return run.attempts[-1] if run.attempts else None

    def kill(self, run: FlowRun, attempt: Iterator[str]) -> None:
        """Kill the saver, and with it all its saves; another one is started."""
        del run, attempt
        self.close()
        for each in self.runs.values():
            if each.attempts and each.state == "running":
                each.state = "pending"
            each.attempts.clear()
        self._saver = DrivenSaver(self._spool, self._attempts, self.before_commit)

    def recover_images(self, spool: Path) -> None:
        """The saver looks when the processes of all commits have had the time to end."""
        del spool
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver_module, "SETTLE_S", -60.0)
            self.begin_due()

    def make_trigger(self, settings: Settings) -> "Line":
        return Line(settings)

    def close(self) -> None:
        self._saver.die()

    def end(self) -> None:
        """End the saver, and leave the product as it was."""
        self.close()
        self._patch.undo()


class Line(SaveTrigger):
    """A trainer's line to the saver of its node, which looks when the test says so."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._saver = _Control(settings.spool, settings.home)

    def hang_up(self) -> None:
        """Its trainer has ended."""
        self._unsent.clear()


class _Control(SaverControl):
    def wake(self) -> None:
        pass

    def connect(self) -> None:
        pass
