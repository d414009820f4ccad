"""The methods of Trinity-RFT's Synchronizer; names and meanings are Trinity's.

The rules of a rendezvous are those of ``sync_barrier``. Members, the trainer and the explorers, are
Ray actors. Ray does not report the death of an actor, but no longer finds a dead one by its name.
They have Trinity's methods: ``get_weight_sync_info()`` of the trainer returns address, port and the
meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta`` and
``teardown_weight_sync_group`` are called here only. All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.saves.journal import Entry
from trinity_sync.weights.committed import find_model_path
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.sync_barrier import Rendezvous, Status, SyncSettings
from trinity_sync.weights.versions import Source, Version

logger = logging.getLogger(__name__)

_PROBE_S = 1.0
"""Seconds between two looks for a member that others wait for."""


class _Actors:
    """The trainer and the explorers of a Synchronizer, in its Ray namespace."""

    def __init__(
        self, registry: AsyncVersionRegistry, namespace: str, settings: SyncSettings
    ) -> None:
        self._registry, self._namespace, self._settings = registry, namespace, settings

    async def form_group(self, timeout_s: float) -> None:
        """Make trainer and explorers join one process group; each answer may take ``timeout_s``.

        The trainer has rank 0, and the first worker of an explorer rank 1. Several explorers get
        the rank of their first worker as ``rank_offset``, in the order of their names.

        Raises:
            WeightSyncError: a member is no actor, failed, died or did not answer in time. Members
                that had joined leave again.
        """
        from ray.exceptions import RayError

        names = [self._settings.trainer, *self._explorer_names]
        actors = [await self._find(name) for name in names]
        if missing := [name for name, actor in zip(names, actors, strict=True) if actor is None]:
            raise WeightSyncError(
                f"{', '.join(missing)} are no Ray actors of namespace {self._namespace!r}; start "
                "them there, name the trainer in the settings, or set an explorer's status to "
                "stopped"
            )
        (trainer, *explorers), group = actors, self._settings.group
        workers = self._settings.explorer_world_size
        try:
            info = trainer.get_weight_sync_info.remote()
            address, port, meta = await asyncio.wait_for(info, timeout_s)
            join = (address, port, 1 + workers * len(explorers), group, timeout_s)
            calls = []
            for index, explorer in enumerate(explorers):
                own = {"rank_offset": 1 + index * workers} if len(explorers) > 1 else {}
                calls.append(explorer.setup_weight_sync_group.remote(*join, **own))
            calls.append(trainer.setup_weight_sync_group.remote(*join))
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
            calls = [each.set_state_dict_meta.remote(meta) for each in explorers]
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
        except (TimeoutError, RayError) as error:
            await self.leave_group(min(timeout_s, 10.0))
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise WeightSyncError(
                f"the group {group!r} of {', '.join(names)} was not formed: {reason}. See the logs "
                "of these actors, and set it up again."
            ) from error

    async def leave_group(self, timeout_s: float) -> None:
        """Make all members leave, explorers first, so no broadcast is in flight. Never raises.

        Each answer may take ``timeout_s``.
        """
        await asyncio.gather(*(self._leave(name, timeout_s) for name in self._explorer_names))
        await self._leave(self._settings.trainer, timeout_s)

    async def _leave(self, name: str, timeout_s: float) -> None:
        from ray.exceptions import RayError

        if (actor := await self._find(name)) is None:
            return
        try:
            await asyncio.wait_for(actor.teardown_weight_sync_group.remote(), timeout_s)
        except (TimeoutError, RayError) as error:
            logger.warning("%s did not leave the group of a broadcast: %r", name, error)

    async def _find(self, name: str) -> Any:
        """Return a live actor, or None, without blocking the event loop."""
        import ray

        try:
            return await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return None

    @property
    def _explorer_names(self) -> list[str]:
        return sorted(self._registry.barrier.live_explorers or {self._settings.explorer})

    async def record(self, name: str) -> Any:
        """Record that a member is an actor, if it is, and return it."""
        if actor := await self._find(name):
            self._registry.barrier.actors.add(name)
        return actor

    async def watch(self, explorer: str | None, over: Callable[[], bool]) -> None:
        """Set a member (None: the trainer) to stopped if it dies before the wait is ``over``."""
        name, barrier = explorer or self._settings.trainer, self._registry.barrier
        known = None
        while True:
            actor = await self.record(name)
            is_gone = actor is None and name in barrier.actors
            if is_gone or known not in (None, actor):  # another actor may have its name already
                break
            known = actor
            if await self._registry.until(lambda: over() or None, _PROBE_S):
                return
        logger.warning("%s died before a weight sync and counts as stopped", name)
        barrier.actors.discard(name)
        if explorer is None:
            barrier.set_trainer(Status.STOPPED)
        else:
            barrier.set_explorer(explorer, Status.STOPPED)
        await self._registry.notify()


class TrinityMethods:
    """Methods of Trinity-RFT's Synchronizer, a Ray actor of ``namespace``."""

    def __init__(self, root: str, namespace: str, settings: SyncSettings) -> None:
        self._settings = settings
        self._registry = AsyncVersionRegistry(root, settings.role)
        self._members = _Actors(self._registry, namespace, settings)
        self._last_rendezvous: Rendezvous | None = None
        """The last rendezvous that succeeded."""
        self._refusals = 0
        """Number of calls of `notify_no_new_model_state_dict`."""
        self._failed = (0, 0)
        """Run and step of the newest sync that has failed."""
        self._told: dict[str, tuple[int, int]] = {}
        """The same when the last wait of an explorer ended; a failed sync ends one wait of each."""
        self._waits = 0
        """Explorers that wait for a version; the status is of a name, which Trinity's share."""
        self._state: tuple[int, dict[str, Any] | str | None] = (0, None)
        """Step and value of `set_model_state_dict`: name -> object reference, a path, or None."""

    async def set_model_state_dict(
        self, model_state_dict: dict[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Record the weights of a step.

        A dict's tensors are put into Ray's object store, one by one. If it holds object references
        instead, no tensor passes through this process.

        Args:
            model_state_dict: tensors or object references by name; or the path of a folder with the
                weights; or None for a commit, or for a broadcast that has ended, whose explorers
                then serve that version.
            trainer_step: step of the weights.
        """
        await self._registry.refresh()
        source: Source = "memory"
        state: dict[str, Any] | str | None = model_state_dict
        if isinstance(model_state_dict, dict):
            state = await asyncio.to_thread(_put_tensors, model_state_dict)
        run = self._registry.versions.run
        if model_state_dict is None:
            newest = self._registry.versions.newest("checkpoint")
            is_committed = newest and (newest.run, newest.step) == (run, trainer_step)
            source = "checkpoint" if is_committed else "nccl"
        rendezvous = self._last_rendezvous
        if state is None and rendezvous and rendezvous.version == trainer_step:
            for explorer in rendezvous.arrived:
                self._registry.versions.set_serving(
                    explorer, trainer_step, self._registry.now(), run
                )
        registry, role = self._registry, self._settings.role
        version = Version(
            trainer_step, run, source, registry.root, role, identity=registry.identity
        )
        if await self._registry.record(version):
            self._state = (trainer_step, state)

    async def get_model_state_dict(self) -> tuple[dict[str, Any] | str | None, int]:
        """Return what `set_model_state_dict` was given last, and its step.

        That is tensors by name, or a path. Without any, as after a restart: None and the step of
        the newest version, which is read from memory or from its commit.
        """
        step, state = self._state
        if isinstance(state, dict):
            values = await asyncio.gather(*state.values())
            return dict(zip(state, values, strict=True)), step
        return state, step if state else self._registry.number

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Yield names and tensors of the state dict, one at a time.

        Raises:
            ConfigError: `set_model_state_dict` was given a path.
        """
        state = self._state[1]
        if isinstance(state, str):
            raise ConfigError(f"the newest weights are at {state}; load them from there")
        for name, reference in (state or {}).items():
            yield name, await reference

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Return name, dtype (``bfloat16``) and shape of each tensor; None without a state dict."""
        state = self._state[1]
        if not isinstance(state, dict):
            return None
        found = []
        for name, reference in state.items():
            tensor = await reference
            found.append((name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape)))
        return found

    async def get_latest_model_version(self) -> int:
        """Return the step of the newest version; 0, the base model, if there is none."""
        return self._registry.number

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Return the folder of the newest committed weights; None if there is none.

        Args:
            use_huggingface: return its ``huggingface`` folder, if it has full weights.
        """
        role = self._settings.role
        path = await asyncio.to_thread(
            find_model_path, self._registry.root, role, use_huggingface=use_huggingface
        )
        return str(path) if path else None

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """Wait for a version newer than ``current_version``.

        The explorer's status is ``require_sync`` meanwhile. The wait ends as well if the trainer
        stops, dies, fails to sync, or calls `notify_no_new_model_state_dict`, or at the time-out.

        Args:
            current_version: step of the version that the explorer has.
            no_wait: return at once.
            explorer: name of the explorer; by default the one in the settings.

        Returns:
            Step of the newest version, which is ``current_version`` if there is no newer one.
        """
        explorer = explorer or self._settings.explorer
        refusals, told = self._refusals, self._told.get(explorer, (0, 0))

        def answer() -> bool | None:
            stopped = self._registry.barrier.trainer is Status.STOPPED
            over = no_wait or stopped or self._refusals != refusals
            over = over or self._failed > max(told, (self._registry.versions.run, current_version))
            over = over or self._registry.number > current_version
            return over or self._registry.versions.newer(current_version) is not None or None

        if not answer():
            self._registry.barrier.set_explorer(explorer, Status.REQUIRE_SYNC)
            watches = self._members.watch(None, lambda: False), self._follow_saves()
            tasks = [self._registry.run_in_background(each) for each in watches]
            self._waits += 1
            try:
                await self._registry.notify()
                await self._registry.until(answer, self._settings.timeout_s)
            finally:
                for task in tasks:
                    task.cancel()
                self._waits -= 1
                self._registry.barrier.set_running({explorer})
        self._told[explorer] = self._failed
        return self._registry.number

    async def notify_no_new_model_state_dict(self) -> None:
        """Release the calls of `wait_new_model_state_dict`, unless a save is in flight."""
        last = await self._registry.find_last_save()
        if last is None or last.has_ended or last.step <= self._registry.number:
            self._refusals += 1
            await self._registry.notify()

    async def _follow_saves(self) -> None:
        """Notice that the newest save has failed, where syncs are commits, without end."""
        while True:
            last, newest = await self._registry.find_last_save(), self._registry.versions.newest()
            if last and last.has_failed and (newest is None or newest.source == "checkpoint"):
                await self._end_waits_for(last)
            await asyncio.sleep(_PROBE_S)

    async def _end_waits_for(self, failed: Entry | Version) -> None:
        self._failed = max(self._failed, (failed.run, failed.step))
        await self._registry.notify()

    async def set_trainer_status(self, status: Any) -> None:
        """Set the trainer's status; one that stops releases the explorers that wait.

        Args:
            status: running, require_sync or stopped, as Trinity's enum or its value.

        Raises:
            ConfigError: there is no such status.
        """
        await self._registry.refresh()
        self._registry.barrier.set_trainer(Status.parse(status))
        self._registry.run_in_background(self._members.record(self._settings.trainer))
        await self._registry.notify()

    async def set_explorer_status(
        self, status: Any, old_status: Any = None, explorer: str | None = None
    ) -> None:
        """Set the status of an explorer.

        Args:
            status: running, require_sync or stopped, as Trinity's enum or its value.
            old_status: not used; a status belongs to the explorer, not to a count.
            explorer: name of the explorer; by default the one in the settings.

        Raises:
            ConfigError: there is no such status.
        """
        name = explorer or self._settings.explorer
        self._registry.barrier.set_explorer(name, Status.parse(status))
        self._registry.run_in_background(self._members.record(name))
        await self._registry.notify()

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Return whether the trainer requires a sync; None if it has run, and stopped."""
        barrier = self._registry.barrier
        is_over = barrier.had_trainer and barrier.trainer is Status.STOPPED
        return None if is_over else barrier.trainer is Status.REQUIRE_SYNC

    async def explorer_requires_sync(self) -> bool:
        """Return whether any explorer requires a sync."""
        return self._waits > 0 or Status.REQUIRE_SYNC in self._registry.barrier.explorers.values()

    # The broadcast

    async def ready_to_nccl_sync(
        self,
        module: str,
        trainer_step: int | None = None,
        explorer: str | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Wait at the barrier before a broadcast.

        The trainer waits for every explorer that has not stopped. A dead member ends the wait if it
        is a Ray actor of the Synchronizer's namespace; otherwise the time-out does. Nothing has
        been sent yet, so no version is recorded: the trainer calls
        ``set_model_state_dict(None, trainer_step)`` after the broadcast.

        Args:
            module: ``trainer`` or ``explorer``.
            trainer_step: step that the trainer sends; an explorer passes none.
            explorer: name of the explorer; by default the one in the settings.
            timeout_s: seconds to wait; by default those of the settings.

        Returns:
            The step if all members are ready; None for all of them if not.

        Raises:
            ConfigError: ``module`` is unknown, or a trainer passes no step.
        """
        if module not in ("trainer", "explorer"):
            raise ConfigError(f"module {module!r} is not known; pass 'trainer' or 'explorer'")
        name = (explorer or self._settings.explorer) if module == "explorer" else None
        if name is None:
            if trainer_step is None:
                raise ConfigError("a trainer that is ready for a sync has to say its trainer_step")
            await self._registry.refresh()
        rendezvous = self._registry.barrier.arrive(name, trainer_step)
        self._registry.run_in_background(self._members.record(name or self._settings.trainer))
        for member in {*self._registry.barrier.live_explorers, None} - {name, *rendezvous.watched}:
            rendezvous.watched.add(member)
            watch = self._members.watch(member, lambda: rendezvous.over)
            self._registry.run_in_background(watch)
        try:
            await self._registry.notify()
            limit = self._settings.timeout_s if timeout_s is None else timeout_s
            await self._registry.until(lambda: rendezvous.over or None, limit)
        finally:
            self._registry.barrier.withdraw(rendezvous, name)
        await self._registry.notify()
        if rendezvous.version is None:
            logger.warning(
                "%s was ready for a weight sync, but not all other members were", name or "trainer"
            )
        else:
            self._last_rendezvous = rendezvous
        return rendezvous.version

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Make trainer and explorers form the process group of a broadcast.

        Args:
            timeout: seconds to wait for each answer; by default those of the settings.

        Raises:
            WeightSyncError: a member cannot be reached, failed, or did not answer in time.
        """
        await self._members.form_group(timeout or self._settings.timeout_s)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Make explorers leave the process group, then the trainer; dead members are skipped."""
        await self._members.leave_group(min(60.0, self._settings.timeout_s))


def _put_tensors(state: dict[str, Any]) -> dict[str, Any]:
    import ray

    return {
        name: value if isinstance(value, ray.ObjectRef) else ray.put(value)
        for name, value in state.items()
    }
