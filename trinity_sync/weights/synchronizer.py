"""The Synchronizer: the one place of a job that knows which version of the weights is where.

A named, detached Ray actor with the methods of Trinity-RFT's. It holds versions and references,
and never tensors: those are in the trainer's shared memory, in commits, or in Ray's object store.
Nobody polls. A publish, a commit or a change of status wakes those who wait, a wait ends by one of
these or by its time-out, and files are read and written beside the event loop.

What it knows is in ``state.json``, so an actor that Ray starts again goes on with the same
versions; calls that were under way are made again by Ray.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.errors import ConfigError, StackError, WeightSyncError
from trinity_sync.layout import job_id
from trinity_sync.weights import meeting
from trinity_sync.weights.book import Reader
from trinity_sync.weights.committed import model_path
from trinity_sync.weights.files import address_file, write_address
from trinity_sync.weights.ledger import Ledger, known_root
from trinity_sync.weights.parties import Handshake, Status
from trinity_sync.weights.version import Source, Version

logger = logging.getLogger(__name__)

NAMESPACE = "trinity_sync"
"""Ray namespace of Synchronizers, unless Trinity's config or the caller names another."""


@dataclass(frozen=True)
class SyncSettings:
    """What a Synchronizer needs to know of its job; ``of`` reads Trinity's config."""

    timeout_s: float = 3600.0
    """Trinity's ``sync_timeout``: the longest that a wait takes where the caller names no other."""
    role: str = "actor"
    """Whose weights: the folder under ``global_step_N/``."""
    trainer: str = "trainer"
    """Name of the trainer's Ray actor, for the handshake and the group of a broadcast."""
    explorer: str = "explorer"
    """Name of the explorer where a call names none: Trinity has one."""
    explorer_world_size: int = 1
    """Workers of one explorer that join the group of a broadcast."""
    group: str = "rollout_weight_sync"

    @classmethod
    def of(cls, config: Any) -> "SyncSettings":
        """Those of a Trinity config; ours where it says nothing."""
        sync = getattr(config, "synchronizer", None)
        ours = cls()
        return cls(
            timeout_s=float(getattr(sync, "sync_timeout", None) or ours.timeout_s),
            trainer=getattr(getattr(config, "trainer", None), "name", None) or ours.trainer,
            explorer=getattr(getattr(config, "explorer", None), "name", None) or ours.explorer,
            explorer_world_size=getattr(sync, "explorer_world_size", None) or 1,
            group=getattr(sync, "group_name", None) or ours.group,
        )


class Synchronizer:
    """See the module. Get it by `get_actor`; methods are those of the Ray actor."""

    @classmethod
    def get_actor(
        cls,
        config: Any = None,
        namespace: str | None = None,
        *,
        root: str | Path | None = None,
        settings: SyncSettings | None = None,
    ) -> Any:
        """The job's Synchronizer; it is made if there is none, by one of all who ask at once.

        Args:
            config: Trinity's, which names root (``checkpoint_job_dir``) and ``ray_namespace``.
            namespace: Ray namespace instead of that.
            root: the job's root instead of that. Without any, the only one of the namespace.
            settings: instead of what the config says; those of who asked first count.

        Raises:
            ConfigError: no root, and not exactly one Synchronizer in the namespace.
            StackError: this process is not in a Ray cluster.
        """
        if not ray.is_initialized():
            raise StackError(
                "the Synchronizer is a Ray actor, and this process is in no Ray cluster; call "
                "ray.init(address=...) first"
            )
        namespace = namespace or getattr(config, "ray_namespace", None) or NAMESPACE
        root = root or getattr(config, "checkpoint_job_dir", None)
        if root is None:
            return _only_one(namespace)
        root = known_root(root)
        name = f"synchronizer-{job_id(root)}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {
            "name": name,
            "namespace": namespace,
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": 10_000,  # one for each call that waits
            "num_cpus": 0,
            "scheduling_strategy": here,  # the root is here for sure
        }
        settings = settings or SyncSettings.of(config)
        return ray.remote(cls).options(**options).remote(root, name, namespace, settings)

    def __init__(self, root: str, name: str, namespace: str, settings: SyncSettings) -> None:
        self._root, self._namespace = root, namespace
        self._settings = settings
        write_address(root, name, namespace)  # first: a commit from here on is told, or is read
        self._ledger = Ledger(root, settings.role)
        self._refusals = 0
        """Counts `notify_no_new_model_state_dict`."""
        self._state: dict[str, Any] | str | None = None
        """Of Trinity's `set_model_state_dict`: name -> reference into Ray's object store."""
        self._actors: dict[str, Any] = {}
        """Parties that are Ray actors of this namespace; one that cannot be found again died."""
        self._tasks: set[asyncio.Task[None]] = set()

    # What the trainer says

    async def publish(self, version: Version) -> bool:
        """A version can be had; whether it is the newest now.

        One of an earlier run that a later run has left behind is not taken. What comes late, or
        twice, does no harm.
        """
        await self._ledger.refresh()
        return await self._ledger.record(version)

    async def committed(self, root: str, run: int, step: int, kinds: Sequence[str]) -> bool:
        """A step of ``kinds`` is committed; whether it is the newest version now."""
        if "state_dict" not in kinds or known_root(root) != self._root:
            return False
        return await self.publish(Version(step, run, "checkpoint", self._root, self._settings.role))

    async def set_model_state_dict(
        self, model_state_dict: dict[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Trinity's: the weights of a step, or where they are, or that there are some.

        A dict's tensors go to Ray's object store, one by one; it may hold references instead, and
        then no byte of them passes through this process. None stands for a commit or a broadcast.
        """
        await self._ledger.refresh()
        source: Source = "memory"
        state: dict[str, Any] | str | None = model_state_dict
        if isinstance(model_state_dict, dict):
            state = await asyncio.to_thread(_stored, model_state_dict)
        elif model_state_dict is None:
            newest = self._ledger.book.newest("checkpoint")
            source = "checkpoint" if newest and newest.step == trainer_step else "nccl"
        run = self._ledger.book.run
        version = Version(trainer_step, run, source, self._root, self._settings.role)
        if await self._ledger.record(version):
            self._state = state

    async def set_trainer_status(self, status: Any) -> None:
        """Trinity's: running, require_sync or stopped. Explorers that wait for it are let go."""
        await self._ledger.refresh()
        self._ledger.parties.set_trainer(Status.of(status))
        await self._ledger.tell()

    async def notify_no_new_model_state_dict(self) -> None:
        """Trinity's: let go who waits in `wait_new_model_state_dict`; there is nothing new."""
        self._refusals += 1
        await self._ledger.tell()

    # What explorers and readers ask

    async def latest(self, source: Source | None = None) -> Version | None:
        """The newest version, or the newest that can be had from ``source``."""
        return self._ledger.book.newest(source)

    async def wait_newer(
        self, than: int, timeout_s: float | None = None, run: int | None = None
    ) -> Version | None:
        """Wait for a version newer than step ``than``; None if none came within ``timeout_s``.

        Name the ``run`` that made yours, and the same step of a run that resumed counts as newer.
        """
        return await self._ledger.until(lambda: self._ledger.book.newer(than, run), timeout_s)

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """Trinity's: the number of a newer version, once there is one.

        It is ``current_version``, or what is newest, if the trainer stops, says that there is none,
        or lets ``sync_timeout`` pass. The explorer requires a sync meanwhile, and no longer.
        """
        explorer = explorer or self._settings.explorer
        refusals = self._refusals

        def answer() -> bool | None:
            stopped = self._ledger.parties.trainer is Status.STOPPED
            over = (
                no_wait
                or stopped
                or self._refusals != refusals
                or self._ledger.number > current_version
            )
            return over or self._ledger.book.newer(current_version) is not None or None

        if answer():
            return self._ledger.number
        self._ledger.parties.set_explorer(explorer, Status.REQUIRE_SYNC)
        await self._ledger.tell()
        try:
            await self._ledger.until(answer, self._settings.timeout_s)
        finally:
            self._ledger.parties.back_to_work({explorer})
        return self._ledger.number

    async def get_latest_model_version(self) -> int:
        """Trinity's: the newest version's step; 0, the base model, if there is none."""
        return self._ledger.number

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Trinity's: the folder of the newest committed weights; see `committed.model_path`."""
        role = self._settings.role
        path = await asyncio.to_thread(
            model_path, self._root, role, use_huggingface=use_huggingface
        )
        return str(path) if path else None

    async def get_model_state_dict(self) -> tuple[dict[str, Any] | str | None, int]:
        """Trinity's: what `set_model_state_dict` was given last, and the newest version's step."""
        state, number = self._state, self._ledger.number
        if isinstance(state, dict):
            values = await asyncio.gather(*state.values())
            return dict(zip(state, values, strict=True)), number
        return state, number

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Trinity's: the same, one tensor after the other, as a stream of Ray references."""
        state = self._state
        if isinstance(state, str):
            raise ConfigError(f"the newest weights are at {state}; load them from there")
        for name, reference in (state or {}).items():
            yield name, await reference

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Trinity's: name, dtype ("bfloat16") and shape of each tensor; None without a dict."""
        if not isinstance(self._state, dict):
            return None
        found = []
        for name, reference in self._state.items():
            tensor = await reference
            found.append((name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape)))
        return found

    async def serving(self, reader: str, step: int | None, run: int | None = None) -> None:
        """``reader`` serves the version of ``step`` now, or (None) serves no more."""
        if step is None:
            self._ledger.book.leave(reader)
        else:
            self._ledger.book.serve(reader, step, self._ledger.now(), run)
        await self._ledger.save()

    async def readers(self) -> tuple[Reader, ...]:
        """Who serves which version, and how stale that is."""
        return self._ledger.book.readers(self._ledger.now())

    # Who requires a sync

    async def set_explorer_status(
        self, status: Any, old_status: Any = None, explorer: str | None = None
    ) -> None:
        """Trinity's; with several explorers each passes its name.

        ``old_status`` is not needed: the status belongs to the explorer, not to a count.
        """
        name = explorer or self._settings.explorer
        self._ledger.parties.set_explorer(name, Status.of(status))
        self._in_background(self._note_actor(name))
        await self._ledger.tell()

    async def get_trainer_status(self) -> Status:
        """Trinity's."""
        return self._ledger.parties.trainer

    async def get_explorer_status_counts(self) -> dict[Status, int]:
        """Trinity's."""
        return dict(self._ledger.parties.counts)

    async def explorers(self) -> dict[str, Status]:
        """Every explorer that was heard of, and its status."""
        return dict(self._ledger.parties.explorers)

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Trinity's: None if the trainer has stopped."""
        trainer = self._ledger.parties.trainer
        return None if trainer is Status.STOPPED else trainer is Status.REQUIRE_SYNC

    async def explorer_requires_sync(self) -> bool:
        """Trinity's: whether any explorer does."""
        return self._ledger.parties.counts[Status.REQUIRE_SYNC] > 0

    # The handshake and the group of a broadcast

    async def ready_to_nccl_sync(
        self,
        module: str,
        trainer_step: int | None = None,
        explorer: str | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Trinity's: wait for the other side; the version if all are ready, None for all if not.

        The trainer meets every explorer that has not stopped. One that is dead, where it is a Ray
        actor of the Synchronizer's namespace, ends the wait; else the time-out does. Whoever gets
        None goes on with its work, and no version was made.
        """
        who = _party(module, trainer_step, explorer or self._settings.explorer)
        if who is None:
            await self._ledger.refresh()
        shake = self._ledger.parties.arrive(who, trainer_step)
        if shake.version is not None:
            step, run = shake.version, self._ledger.book.run
            version = Version(step, run, "nccl", self._root, self._settings.role)
            self._ledger.book.record(version, self._ledger.now())
        if who is not None:
            self._in_background(self._note_actor(who))
        for name in self._ledger.parties.live_explorers - {who}:
            self._in_background(self._watch(name, shake))
        if who is not None and shake.step is not None:
            self._in_background(self._watch(None, shake))
        try:
            await self._ledger.tell()
            limit = self._settings.timeout_s if timeout_s is None else timeout_s
            await self._ledger.until(lambda: shake.over or None, limit)
        finally:
            self._ledger.parties.withdraw(shake, who)
        await self._ledger.tell()
        if shake.version is None:
            logger.warning("%s was ready for a weight sync, the others were not", who or "trainer")
        return shake.version

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Trinity's: tell the explorers where the trainer's group is.

        Raises:
            WeightSyncError: one cannot be reached, failed, or did not answer in time.
        """
        explorers = await self._explorer_actors()
        limit = self._settings.timeout_s
        await meeting.announce(explorers, master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Trinity's: have trainer and explorers form the group of a broadcast.

        Raises:
            WeightSyncError: one cannot be reached, failed, or did not answer within ``timeout``
                seconds.
        """
        trainer = await meeting.find(self._settings.trainer, self._namespace)
        if trainer is None:
            raise WeightSyncError(
                f"trainer {self._settings.trainer!r} is no Ray actor of namespace "
                f"{self._namespace!r}; start it there, or name it in the settings"
            )
        await meeting.set_up(
            trainer,
            await self._explorer_actors(),
            workers=self._settings.explorer_world_size,
            group=self._settings.group,
            timeout_s=timeout or self._settings.timeout_s,
        )

    async def coordinate_weight_sync_teardown(self) -> None:
        """Trinity's: explorers leave the group, then the trainer; the dead do not hold it up."""
        names = sorted(self._ledger.parties.live_explorers)
        found = {name: await meeting.find(name, self._namespace) for name in names}
        trainer = await meeting.find(self._settings.trainer, self._namespace)
        limit = min(60.0, self._settings.timeout_s)
        await meeting.tear_down(trainer, found, timeout_s=limit)

    async def stop(self) -> None:
        """End this actor for good; what it knew stays in ``state.json``."""
        await asyncio.to_thread(address_file(self._root).unlink, missing_ok=True)
        ray.actor.exit_actor()

    async def _explorer_actors(self) -> dict[str, Any]:
        """Those that have not stopped.

        Raises:
            WeightSyncError: there is none, or one is no Ray actor of this namespace.
        """
        names = self._ledger.parties.live_explorers or {self._settings.explorer}
        found = {name: await meeting.find(name, self._namespace) for name in sorted(names)}
        if missing := [name for name, actor in found.items() if actor is None]:
            raise WeightSyncError(
                f"explorers {', '.join(missing)} are no Ray actors of namespace "
                f"{self._namespace!r}; start them there, or set their status to stopped"
            )
        return found

    async def _note_actor(self, name: str) -> None:
        if actor := await meeting.find(name, self._namespace):
            self._actors[name] = actor

    async def _watch(self, explorer: str | None, shake: Handshake) -> None:
        """End the handshake if that party (None: the trainer) has died; it may answer late."""
        name = explorer or self._settings.trainer
        await self._note_actor(name)
        if name not in self._actors or not await meeting.died(self._actors[name]) or shake.over:
            return
        logger.warning("%s died before a weight sync", name)
        del self._actors[name]
        if explorer is None:
            self._ledger.parties.set_trainer(Status.STOPPED)
        else:
            self._ledger.parties.set_explorer(explorer, Status.STOPPED)
        await self._ledger.tell()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)


def _party(module: str, trainer_step: int | None, explorer: str) -> str | None:
    if module == "explorer":
        return explorer
    if module != "trainer":
        raise ConfigError(f"module {module!r} is not known; pass 'trainer' or 'explorer'")
    if trainer_step is None:
        raise ConfigError("a trainer that is ready for a weight sync has to say its trainer_step")
    return None


def _stored(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, ray.ObjectRef) else ray.put(value)
        for name, value in state.items()
    }


def _only_one(namespace: str) -> Any:
    named = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace and actor["name"].startswith("synchronizer-")
    ]
    if len(named) != 1:
        raise ConfigError(
            f"namespace {namespace!r} has {len(named)} Synchronizers; pass root, the job's folder"
        )
    return ray.get_actor(named[0], namespace=namespace)
