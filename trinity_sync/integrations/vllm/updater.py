"""Bring a running vLLM engine to the newest version of the weights.

The updater opens the version before it tells the engine to load it, so on the trainer's node
nothing can overwrite it meanwhile; the weights themselves do not pass through this process. By
default it lets requests in flight end first, so that no answer is of two versions.

vLLM need not be installed for an engine behind a URL. Its server takes these calls with
``VLLM_SERVER_DEV_MODE=1``.
"""

import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from trinity_sync import Version, WeightReader
from trinity_sync.adapter import make_reader_name
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.integrations.vllm.pinned_version import make_claim, wait_for
from trinity_sync.integrations.vllm.server_api import RefusedError, ServerApi

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Version of the weights of an engine that did not answer to an update."""
CHECK_S = 5.0
"""Seconds after which `VLLMUpdater.follow` looks whether the engine was started again."""

Pause = Literal["wait", "abort", "keep"]
"""What becomes of requests in flight: they end first; they are aborted; or they are frozen, and go
on with the new weights, which compute the cache of their tokens again."""


class VLLMUpdater:
    """Updates one engine from one job. One thread uses it.

    Args:
        engine: URL of a vLLM server, or an ``LLM`` of this process; started with
            ``weight_transfer_config`` of backend ``trinity_sync``.
        root: the job's root, as this process and the engine's workers see it.
        role: role of the weights, as the trainer's `upload` names it.
        verify: compare the digests of files that are read from a commit.
        compare: compare the tensors with the model before they are loaded, and refuse an update
            that does not fill it; False for a model with parameters that no trainer sends.
        api_key: the key of the server, if it has one.
        timeout_s: seconds for an answer of the engine. Requests in flight count, if it waits for
            them.

    Attributes:
        version: the version that this updater loaded last, with its run; None if an update failed.

    Raises:
        ConfigError: ``engine`` is neither a URL nor an ``LLM``.
    """

    def __init__(
        self,
        engine: Any,
        root: str | Path,
        *,
        role: str = "actor",
        verify: bool = False,
        compare: bool = True,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        root = Path(root).resolve()
        self._engine: _InProcess | _Server
        if isinstance(engine, str):
            self._engine = _Server(engine, api_key, timeout_s)
        elif hasattr(engine, "llm_engine"):
            self._engine = _InProcess(engine)
        else:
            raise ConfigError(
                f"{engine!r} is no vLLM engine that can be updated; pass an LLM, or the URL of a "
                "server"
            )
        self._timeout_s = timeout_s
        self._name = uuid.uuid4().hex
        self._init_info = {"root": str(root), "role": role, "verify": verify, "compare": compare}
        self._reader = WeightReader(root=root, role=role, name=make_reader_name("updater"))
        self.version: Version | None = None

    def get_served_step(self) -> int | None:
        """Return the step that the engine says it serves; None for the weights it started with."""
        version = self._engine.get_weight_version()
        return int(version) if version.isdecimal() else None

    def update(
        self, min_step: int | None = None, *, timeout_s: float = 60.0, pause: Pause = "wait"
    ) -> int:
        """Load the newest version, unless the engine serves it.

        Args:
            min_step: wait for a version of at least this step; by default, for any.
            timeout_s: seconds to wait for it. The engine generates meanwhile.
            pause: what becomes of requests in flight: ``wait`` lets them end first, ``abort`` ends
                them, ``keep`` freezes them and continues them with the new weights.

        Returns:
            The step that the engine serves now.

        Raises:
            WeightSyncError: there is no such version in time, another updater updates the engine,
                or the engine refused the version; it serves the one that it had. If the engine has
                not answered, it may have loaded it: `get_served_step` is None then, and the next
                update loads the newest.
        """
        newest = wait_for(self._reader, min_step or 0, timeout_s)
        if self._serves(newest):
            return newest.step
        with self._reader.open(newest) as view:
            version = view.version
            self._load(version, pause)
        self.version = version
        return version.step

    def follow(self, *, timeout_s: float | None = None, pause: Pause = "wait") -> Iterator[int]:
        """Update the engine at each new version, and yield the step that it serves then.

        An engine that was started again gets the newest version again.

        Args:
            timeout_s: seconds without a new version after which it ends; None follows for ever.
            pause: see `update`.

        Raises:
            WeightSyncError: the engine did not load a version.
        """
        while True:
            deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            left_s = deadline - time.monotonic()
            while self._reader.wait(timeout_s=max(0.0, min(left_s, CHECK_S))) is None:
                if self._has_lost_version():
                    break
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
            yield self.update(pause=pause)

    def close(self) -> None:
        """Unmap the trainer's shared memory."""
        self._reader.close()

    def __enter__(self) -> "VLLMUpdater":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serves(self, version: Version) -> bool:
        served = self.version
        return (
            served is not None
            and (served.run, served.step) == (version.run, version.step)
            and not served.is_of_other_job(version)
            and self.get_served_step() == version.step  # it was not started again
        )

    def _has_lost_version(self) -> bool:
        """Return whether the engine answers, and no longer serves what this updater loaded."""
        with suppress(WeightSyncError):  # it is not up yet
            served = self.get_served_step()
            return self.version is not None and served != self.version.step
        return False

    def _load(self, version: Version, pause: Pause) -> None:
        engine, self.version, is_loaded = self._engine, None, False
        claim = make_claim(self._name, 8 * self._timeout_s, version)  # an update has as many calls
        init_info = {**self._init_info, "claim": claim}
        engine.call("init_weight_transfer_engine", init_info=init_info)
        try:
            try:
                engine.call("start_weight_update")
            except WeightSyncError:  # an updater that was killed has not ended its update
                _end_update(engine)
                engine.call("init_weight_transfer_engine", init_info=init_info)
                engine.call("start_weight_update")
            with _paused(engine, pause):
                update_info = {
                    "step": version.step,
                    "run": version.run,
                    "identity": version.identity,
                    "images": [asdict(image) for image in version.images],
                }
                engine.call("update_weights", update_info=update_info)
                is_loaded = True
                engine.call("update_weight_version", new_version=str(version.step))
            # then another updater may pause the engine
            engine.call("finish_weight_update", weight_version=None)
        except BaseException as error:
            _end_update(engine)
            if is_loaded or not isinstance(error, RefusedError):
                with suppress(WeightSyncError):  # it may have loaded it
                    engine.call("update_weight_version", new_version=UNKNOWN)
            raise
        logger.info("the engine serves version %d (run %d)", version.step, version.run)


def _end_update(engine: "_InProcess | _Server") -> None:
    """End an update in the workers that have not raised an error; vLLM takes no other before."""
    with suppress(WeightSyncError):  # of those that have
        engine.call("finish_weight_update", weight_version=None)


@contextmanager
def _paused(engine: "_InProcess | _Server", mode: Pause) -> Iterator[None]:
    try:
        engine.pause(mode)
        yield
    except BaseException:
        with suppress(WeightSyncError):  # the first error is the one to raise
            engine.resume()
        raise
    engine.resume()


class _InProcess:
    """An ``LLM`` of this process; it has no requests in flight between two calls."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def pause(self, mode: Pause) -> None:
        pass

    def resume(self) -> None:
        self._llm.reset_prefix_cache()  # the old weights have computed it

    def call(self, name: str, **fields: Any) -> None:
        """Call a method of the workers' weight transfer, with the fields of the server's body."""
        as_one = {"init_info", "update_info"} & fields.keys()
        try:
            getattr(self._llm, name)(*([fields] if as_one else fields.values()))
        except Exception as error:  # of a worker, of which vLLM keeps the message
            raise RefusedError(f"the engine did not load the weights: {error}") from error

    def get_weight_version(self) -> str:
        return str(self._llm.get_weight_version())


class _Server:
    """A vLLM server."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        options = "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
        self._call = ServerApi(url, api_key, timeout_s, options=options).call

    def pause(self, mode: Pause) -> None:
        self._call("POST", "/pause", params={"mode": mode})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def call(self, name: str, **fields: Any) -> None:
        """Call a method of the workers' weight transfer, with the fields of the body."""
        self._call("POST", f"/{name}", json=fields or None)

    def get_weight_version(self) -> str:
        return str(self._call("GET", "/weight_info")["weight_version"])
