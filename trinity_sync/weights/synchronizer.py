"""The Synchronizer: the one place of a job that knows which version of the weights is where.

A named, detached Ray actor with the methods of Trinity-RFT's. It holds versions and references,
and never tensors: those are in the trainer's shared memory, in commits, or in Ray's object store.
A publish, a commit or a change of status wakes those who wait, a wait ends by one of these or by
its time-out, and files are read and written beside the event loop. Commits are noticed through the
root, so Prefect's worker and the stack's Ray cluster need not know of the actor.

What it knows is in ``state.json``, so an actor that Ray starts again goes on with the same
versions; calls that were under way are made again by Ray.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, StackError
from trinity_sync.layout import job_id
from trinity_sync.weights.committed import model_path
from trinity_sync.weights.object_store import Copies
from trinity_sync.weights.ray_cluster import in_ray_cluster, require_ray
from trinity_sync.weights.registry.event_loop import AsyncVersionRegistry, resolve_root
from trinity_sync.weights.registry.versions import Reader
from trinity_sync.weights.rendezvous import BroadcastRendezvous
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.state_files import (
    Address,
    address_file,
    read_address,
    write_address,
)
from trinity_sync.weights.sync_barrier import Status
from trinity_sync.weights.sync_settings import SyncSettings
from trinity_sync.weights.version import Gone, Source, Version

NAMESPACE = "trinity_sync"
"""Ray namespace of Synchronizers, unless Trinity's config or the caller names another."""


class Synchronizer(BroadcastRendezvous):
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
            namespace: Ray namespace instead of that; by default that of the one that there is.
            root: the job's root instead of that. Without any, the only one of the namespace.
            settings: instead of what the config says; those of who asked first count.

        Raises:
            ConfigError: no root, and not exactly one Synchronizer in the namespace; or the root's
                is in another namespace.
            StackError: Ray is not installed, or this process is not in a Ray cluster.
        """
        ray = require_ray("the Synchronizer is a Ray actor")
        if not ray.is_initialized():
            raise StackError(
                "the Synchronizer is a Ray actor, and this process is in no Ray cluster; call "
                "ray.init(address=...) first. On the trainer's node, and for commits, a "
                "WeightReader(root=...) needs neither."
            )
        namespace = namespace or getattr(config, "ray_namespace", None)
        root = root or getattr(config, "checkpoint_job_dir", None)
        if root is None:
            return _only_one(namespace or NAMESPACE)
        root = resolve_root(root)
        name, namespace = _place_of(root, namespace, cls.name_for(root))
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
        settings = settings or SyncSettings.from_config(config)
        ray.method(max_task_retries=0)(cls.stop)  # a retry would have Ray start it again
        actor = ray.remote(cls).options(**options).remote(root, name, namespace, settings)
        actor.announce.remote()  # one that was there already may have lost its root
        return actor

    @classmethod
    def name_for(cls, root: str) -> str:
        """Name of the Ray actor of a job."""
        return f"synchronizer-{job_id(root)}"

    def __init__(self, root: str, name: str, namespace: str, settings: SyncSettings) -> None:
        self._root, self._name = root, name
        write_address(root, name, namespace)
        super().__init__(AsyncVersionRegistry(root, settings.role), namespace, settings)
        self._refusals = 0
        """Counts `notify_no_new_model_state_dict`."""
        self._state: tuple[int, dict[str, Any] | str | None] = (0, None)
        """Of Trinity's `set_model_state_dict`: step, and name -> reference into Ray's store."""
        self._copies = Copies()
        self._in_background(self._follow_commits())

    async def announce(self) -> None:
        """Be found by readers, also where the root was removed and begun anew meanwhile."""
        if await asyncio.to_thread(read_address, self._root) is None:
            self._registry.reset()
            self._state = (0, None)
            await asyncio.to_thread(write_address, self._root, self._name, self._namespace)
        await self._registry.refresh()

    # What the trainer says

    async def publish(self, version: Version) -> bool:
        """A version can be had; whether it is the newest now.

        One of an earlier run that a later run has left behind is not taken. What comes late, or
        twice, does no harm.

        Raises:
            ConfigError: the version is of another role than this Synchronizer's.
        """
        self._require_own_role(version)
        await self._registry.refresh()
        is_newest = await self._registry.record(version)
        self._copies.keep_only(self._registry.versions.newest("memory"))
        return is_newest

    async def offer(self, version: Version, world_size: int, timeout_s: float) -> None:
        """One rank's image of a version, which is published once those of all are offered.

        Returns once it is, or a newer one: the trainer has gone on then. Ray repeats the calls that
        were under way when this actor was killed, so offers outlive it.

        Raises:
            ConfigError: as `publish`.
            WeightSyncError: ranks did not offer theirs within ``timeout_s``; they are named.
        """
        self._require_own_role(version)
        if whole := await self._registry.add_images(version, world_size, timeout_s):
            await self.publish(whole)

    async def set_model_state_dict(
        self, model_state_dict: dict[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Trinity's: the weights of a step, or where they are, or that there are some.

        A dict's tensors go to Ray's object store, one by one; it may hold references instead, and
        then no byte of them passes through this process. None stands for a commit, or for a
        broadcast that has ended: the explorers that were ready for it serve that version now.
        """
        await self._registry.refresh()
        source: Source = "memory"
        state: dict[str, Any] | str | None = model_state_dict
        if isinstance(model_state_dict, dict):
            state = await asyncio.to_thread(_stored, model_state_dict)
        elif model_state_dict is None:
            newest = self._registry.versions.newest("checkpoint")
            source = "checkpoint" if newest and newest.step == trainer_step else "nccl"
        run = self._registry.versions.run
        rendezvous = self._last_rendezvous
        if state is None and rendezvous and rendezvous.version == trainer_step:
            for explorer in rendezvous.arrived:
                self._registry.versions.set_serving(
                    explorer, trainer_step, self._registry.now(), run
                )
        version = Version(trainer_step, run, source, self._root, self._settings.role)
        if await self._registry.record(version):
            self._state = (trainer_step, state)

    async def set_trainer_status(self, status: Any) -> None:
        """Trinity's: running, require_sync or stopped. Explorers that wait for it are let go."""
        await self._registry.refresh()
        self._registry.barrier.set_trainer(Status.parse(status))
        self._in_background(self._record_actor(self._settings.trainer))
        await self._registry.notify()

    async def notify_no_new_model_state_dict(self) -> None:
        """Trinity's: let go who waits in `wait_new_model_state_dict`; there is nothing new."""
        self._refusals += 1
        await self._registry.notify()

    # What explorers and readers ask

    async def latest(
        self, source: Source | None = None, *, readable: bool = False
    ) -> Version | None:
        """The newest version, or the newest that can be had from ``source``, or by readers."""
        return self._registry.versions.newest(source, readable=readable)

    async def copies(self, run: int, step: int, ranks: Sequence[int]) -> list[list[Any]]:
        """For each rank, references of a note and bytes in Ray's object store; see `copies.fetch`.

        They are made for the first who asks, and the same for all.

        Raises:
            Gone: the version is not the newest in memory.
        """
        return self._copies.of(self._in_memory(run, step), ranks)

    async def deltas(
        self, base: Version, run: int, step: int, spans: Sequence[Spans]
    ) -> list[list[Any]]:
        """For each rank, the reference of what turns its image of ``base`` into the version's.

        They are made for the first who asks, and the same for all who have that base.

        Raises:
            Gone: the version is not the newest in memory, or it has no images where ``base`` has.
        """
        return self._copies.deltas(base, self._in_memory(run, step), spans)

    def _require_own_role(self, version: Version) -> None:
        if version.role != self._settings.role:
            raise ConfigError(
                f"step {version.step} is of role {version.role!r}, and the Synchronizer of "
                f"{self._root} hands over {self._settings.role!r}; set that role in the "
                "SyncSettings that it is first asked for with, or save the other by commits only"
            )

    def _in_memory(self, run: int, step: int) -> Version:
        newest = self._registry.versions.newest("memory")
        if newest is None or (newest.run, newest.step) != (run, step):
            raise Gone(f"version {step} (run {run}) is not the newest in memory any more")
        return newest

    async def wait_newer(
        self,
        than: int,
        timeout_s: float | None = None,
        run: int | None = None,
        *,
        readable: bool = False,
    ) -> Version | None:
        """Wait for a version newer than step ``than``; None if none came within ``timeout_s``.

        Name the ``run`` that made yours, and the same step of a run that resumed counts as newer.
        With ``readable``, only what readers can have counts.
        """
        return await self._registry.until(
            lambda: self._registry.versions.newer(than, run, readable=readable), timeout_s
        )

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """Trinity's: the number of a newer version, once there is one.

        It is ``current_version``, or what is newest, if the trainer stops or dies, says that there
        is none, or lets ``sync_timeout`` pass. The explorer requires a sync until then.
        """
        explorer = explorer or self._settings.explorer
        refusals = self._refusals

        def answer() -> bool | None:
            stopped = self._registry.barrier.trainer is Status.STOPPED
            over = (
                no_wait
                or stopped
                or self._refusals != refusals
                or self._registry.number > current_version
            )
            return over or self._registry.versions.newer(current_version) is not None or None

        if answer():
            return self._registry.number
        self._registry.barrier.set_explorer(explorer, Status.REQUIRE_SYNC)
        watch = self._in_background(self._watch(None, lambda: False))
        await self._registry.notify()
        try:
            await self._registry.until(answer, self._settings.timeout_s)
        finally:
            watch.cancel()
            self._registry.barrier.set_running({explorer})
        return self._registry.number

    async def get_latest_model_version(self) -> int:
        """Trinity's: the newest version's step; 0, the base model, if there is none."""
        return self._registry.number

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Trinity's: the folder of the newest committed weights; see `committed.model_path`."""
        role = self._settings.role
        path = await asyncio.to_thread(
            model_path, self._root, role, use_huggingface=use_huggingface
        )
        return str(path) if path else None

    async def get_model_state_dict(self) -> tuple[dict[str, Any] | str | None, int]:
        """Trinity's: what `set_model_state_dict` was given last, and of which step that is.

        Without any (also after a restart), None and the newest version's step: it is to be had
        from where that is.
        """
        step, state = self._state
        if isinstance(state, dict):
            values = await asyncio.gather(*state.values())
            return dict(zip(state, values, strict=True)), step
        return state, step if state else self._registry.number

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Trinity's: the same, one tensor after the other, as a stream of Ray references."""
        state = self._state[1]
        if isinstance(state, str):
            raise ConfigError(f"the newest weights are at {state}; load them from there")
        for name, reference in (state or {}).items():
            yield name, await reference

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Trinity's: name, dtype ("bfloat16") and shape of each tensor; None without a dict."""
        state = self._state[1]
        if not isinstance(state, dict):
            return None
        found = []
        for name, reference in state.items():
            tensor = await reference
            found.append((name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape)))
        return found

    async def serving(self, reader: str, step: int | None, run: int | None = None) -> None:
        """``reader`` serves the version of ``step`` now, or (None) serves no more."""
        if step is None:
            self._registry.versions.remove_reader(reader)
        else:
            self._registry.versions.set_serving(reader, step, self._registry.now(), run)
        await self._registry.save()

    async def readers(self) -> tuple[Reader, ...]:
        """Who serves which version, and how stale that is."""
        return self._registry.versions.readers(self._registry.now())

    async def _follow_commits(self) -> None:
        async for _ in self._registry.commits():
            self._has_newer_commit()

    def _has_newer_commit(self) -> None:
        """Called for each commit that is the newest of the job."""

    # Who requires a sync

    async def set_explorer_status(
        self, status: Any, old_status: Any = None, explorer: str | None = None
    ) -> None:
        """Trinity's; with several explorers each passes its name.

        ``old_status`` is not needed: the status belongs to the explorer, not to a count.
        """
        name = explorer or self._settings.explorer
        self._registry.barrier.set_explorer(name, Status.parse(status))
        self._in_background(self._record_actor(name))
        await self._registry.notify()

    async def get_trainer_status(self) -> Status:
        """Trinity's."""
        return self._registry.barrier.trainer

    async def get_explorer_status_counts(self) -> dict[Status, int]:
        """Trinity's."""
        return dict(self._registry.barrier.counts)

    async def explorers(self) -> dict[str, Status]:
        """Every explorer that was heard of, and its status."""
        return dict(self._registry.barrier.explorers)

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Trinity's: None if the trainer has stopped."""
        trainer = self._registry.barrier.trainer
        return None if trainer is Status.STOPPED else trainer is Status.REQUIRE_SYNC

    async def explorer_requires_sync(self) -> bool:
        """Trinity's: whether any explorer does."""
        return self._registry.barrier.counts[Status.REQUIRE_SYNC] > 0

    async def stop(self) -> None:
        """End this actor for good; what it knew stays in ``state.json``."""
        import ray

        await asyncio.to_thread(address_file(self._root).unlink, missing_ok=True)
        ray.actor.exit_actor()


def find_synchronizer(root: str | Path) -> Any | None:
    """Return the Synchronizer of the job at ``root`` if this process is in its Ray cluster."""
    there = read_address(root) if in_ray_cluster() else None
    return _actor_at(there) if there else None


def _stored(state: dict[str, Any]) -> dict[str, Any]:
    import ray

    return {
        name: value if isinstance(value, ray.ObjectRef) else ray.put(value)
        for name, value in state.items()
    }


def _place_of(root: str, wanted: str | None, name: str) -> tuple[str, str]:
    """Name and namespace of the root's Synchronizer, that is or is to be: there must not be two."""
    there = read_address(root)
    if there is None or _actor_at(there) is None:
        return name, wanted or NAMESPACE
    if wanted and there.namespace != wanted:
        raise ConfigError(
            f"the Synchronizer of {root} is in Ray namespace {there.namespace!r}, not in "
            f"{wanted!r}; pass that namespace, or none, or stop that one"
        )
    return there.name, there.namespace


def _actor_at(address: Address) -> Any | None:
    import ray

    try:
        return ray.get_actor(address.name, address.namespace)
    except ValueError:
        return None


def _only_one(namespace: str) -> Any:
    import ray

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
