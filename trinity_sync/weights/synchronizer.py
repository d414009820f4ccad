"""The Synchronizer: the registry of a job's versions of the weights, as a Ray actor.

A named, detached actor with the methods of Trinity-RFT's. It holds versions and object references,
never tensors: those are in the trainer's shared memory, in commits, or in Ray's object store. A
publish, a commit or a change of status wakes the calls that wait; a wait ends by one of these or by
its time-out, and files are read and written in threads. Commits are noticed through the root, so
Prefect's worker and the stack's Ray cluster need not know of the actor.

Its state is in ``state.json``, so an actor that Ray restarts continues with the same versions, and
Ray repeats the calls that were in flight.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, StackError
from trinity_sync.layout import job_id
from trinity_sync.weights.committed import find_model_path
from trinity_sync.weights.object_store import ObjectRefs
from trinity_sync.weights.ray_cluster import in_ray_cluster, require_ray
from trinity_sync.weights.registry.event_loop import AsyncVersionRegistry, resolve_root
from trinity_sync.weights.registry.versions import Reader
from trinity_sync.weights.rendezvous import BroadcastRendezvous
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.state_files import (
    Address,
    address_path,
    read_address,
    write_address,
)
from trinity_sync.weights.sync_barrier import Status
from trinity_sync.weights.sync_settings import SyncSettings
from trinity_sync.weights.version import Source, Version, VersionUnavailableError

NAMESPACE = "trinity_sync"
"""Ray namespace of Synchronizers, unless Trinity's config or the caller names another."""


class Synchronizer(BroadcastRendezvous):
    """Ray actor that knows the versions of a job's weights, and which reader serves which.

    Get it with `get_actor`, and call its methods as those of any Ray actor::

        synchronizer = Synchronizer.get_actor(root="ckpts")
        version = await synchronizer.wait_newer.remote(40, timeout_s=60.0)

    It is needed for readers on other nodes than the trainer's, for broadcasts, and for Trinity-RFT,
    whose method names and meanings it has. It is detached: it lives until `stop`, and is named
    after the job.
    """

    @classmethod
    def get_actor(
        cls,
        config: Any = None,
        namespace: str | None = None,
        *,
        root: str | Path | None = None,
        settings: SyncSettings | None = None,
    ) -> Any:
        """Return the job's Synchronizer, and start it if there is none.

        Concurrent callers get the same actor.

        Args:
            config: Trinity's config, with the root (``checkpoint_job_dir``) and ``ray_namespace``.
            namespace: Ray namespace, instead of the config's; by default that of the running
                Synchronizer of the root, otherwise ``trinity_sync``.
            root: the job's root, instead of the config's. Without a root, the only Synchronizer of
                the namespace is returned.
            settings: settings, instead of those from the config; used only if the actor is started.

        Returns:
            The handle of the Ray actor.

        Raises:
            ConfigError: there is no root, and the namespace does not have exactly one Synchronizer;
                or that of the root runs in another namespace.
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
            return _get_only_actor(namespace or NAMESPACE)
        root = resolve_root(root)
        name, namespace = _resolve_name(root, namespace, cls.name_for(root))
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
            "scheduling_strategy": here,  # this node certainly sees the root
        }
        settings = settings or SyncSettings.from_config(config)
        ray.method(max_task_retries=0)(cls.stop)  # a retry would make Ray restart it
        actor = ray.remote(cls).options(**options).remote(root, name, namespace, settings)
        actor.restore_address.remote()  # the root of a running actor may have been recreated
        return actor

    @classmethod
    def name_for(cls, root: str) -> str:
        """Return the name of the Ray actor of the job at ``root``."""
        return f"synchronizer-{job_id(root)}"

    def __init__(self, root: str, name: str, namespace: str, settings: SyncSettings) -> None:
        self._root, self._name = root, name
        write_address(root, name, namespace)
        super().__init__(AsyncVersionRegistry(root, settings.role), namespace, settings)
        self._refusals = 0
        """Number of calls of `notify_no_new_model_state_dict`."""
        self._state: tuple[int, dict[str, Any] | str | None] = (0, None)
        """Step and value of `set_model_state_dict`: name -> object reference, a path, or None."""
        self._object_refs = ObjectRefs()
        self._in_background(self._follow_commits())

    async def restore_address(self) -> None:
        """Write the address file again if the root was recreated, for readers to find the actor."""
        if await asyncio.to_thread(read_address, self._root) is None:
            self._registry.reset()
            self._state = (0, None)
            await asyncio.to_thread(write_address, self._root, self._name, self._namespace)
        await self._registry.refresh()

    # Calls of the trainer

    async def publish(self, version: Version) -> bool:
        """Record a version that readers can open.

        Superseded versions are ignored. Versions may be published late, or twice.

        Returns:
            Whether it is the newest version now.

        Raises:
            ConfigError: the version is of another role than this Synchronizer's.
        """
        self._require_role(version)
        await self._registry.refresh()
        is_newest = await self._registry.record(version)
        self._object_refs.keep_only(self._registry.versions.newest("memory"))
        return is_newest

    async def add_images(self, version: Version, world_size: int, timeout_s: float) -> None:
        """Add one rank's image of a version, which is published once all ranks have added theirs.

        Returns once this version, or a newer one, is published. Ray repeats the calls that were in
        flight when this actor was killed, so no image is lost with it.

        Args:
            version: the version with the image of the calling rank.
            world_size: number of ranks that add images.
            timeout_s: seconds to wait for the other ranks.

        Raises:
            ConfigError: the version is of another role than this Synchronizer's.
            WeightSyncError: ranks did not add their images in time; the message names them.
        """
        self._require_role(version)
        if complete := await self._registry.add_images(version, world_size, timeout_s):
            await self.publish(complete)

    async def set_model_state_dict(
        self, model_state_dict: dict[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Trinity's: record the weights of a step.

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
        """Trinity's: set the trainer's status; one that stops releases the explorers that wait.

        Args:
            status: running, require_sync or stopped, as Trinity's enum or its value.

        Raises:
            ConfigError: there is no such status.
        """
        await self._registry.refresh()
        self._registry.barrier.set_trainer(Status.parse(status))
        self._in_background(self._record_actor(self._settings.trainer))
        await self._registry.notify()

    async def notify_no_new_model_state_dict(self) -> None:
        """Trinity's: release the calls that wait in `wait_new_model_state_dict`."""
        self._refusals += 1
        await self._registry.notify()

    # Calls of explorers and readers

    async def latest(
        self, source: Source | None = None, *, readable: bool = False
    ) -> Version | None:
        """Return the newest version; None if there is none.

        Args:
            source: consider versions from this source only; by default the fastest source of each.
            readable: consider only versions that a reader can open, from memory or a commit.
        """
        return self._registry.versions.newest(source, readable=readable)

    async def get_image_refs(self, run: int, step: int, ranks: Sequence[int]) -> list[list[Any]]:
        """Return object references of version tag and bytes of images; see ``object_store``.

        They are created for the first caller, and the same for all.

        Args:
            run: the version's run.
            step: the version's step.
            ranks: whose images.

        Returns:
            For each rank the references of an `ImageCopy`.

        Raises:
            VersionUnavailableError: the version is not the newest in memory.
        """
        return self._object_refs.get_image_refs(self._get_in_memory(run, step), ranks)

    async def get_delta_refs(
        self, base: Version, run: int, step: int, spans: Sequence[Spans]
    ) -> list[list[Any]]:
        """Return the object reference of each rank's delta from ``base``; see ``object_store``.

        They are created for the first caller, and the same for all readers that have that base.

        Args:
            base: version that the reader has.
            run: the version's run.
            step: the version's step.
            spans: for each rank, byte ranges of its image that the reader rounds.

        Raises:
            VersionUnavailableError: the version is not the newest in memory, or the images of
                ``base`` are on other nodes.
        """
        return self._object_refs.get_delta_refs(base, self._get_in_memory(run, step), spans)

    def _require_role(self, version: Version) -> None:
        if version.role != self._settings.role:
            raise ConfigError(
                f"step {version.step} is of role {version.role!r}, and the Synchronizer of "
                f"{self._root} serves {self._settings.role!r}; start it with that role in "
                "SyncSettings, or use commits only for the other role"
            )

    def _get_in_memory(self, run: int, step: int) -> Version:
        newest = self._registry.versions.newest("memory")
        if newest is None or (newest.run, newest.step) != (run, step):
            raise VersionUnavailableError(
                f"version {step} (run {run}) is no longer the newest in memory"
            )
        return newest

    async def wait_newer(
        self,
        than: int,
        timeout_s: float | None = None,
        run: int | None = None,
        *,
        readable: bool = False,
    ) -> Version | None:
        """Wait for a newer version.

        Args:
            than: step that the version has to be beyond.
            timeout_s: seconds to wait; None waits without limit.
            run: number of the run that made step ``than``; with it, the same step of a later run
                counts as newer.
            readable: wait for a version that a reader can open, from memory or a commit.

        Returns:
            The newest version; None at the time-out.
        """
        return await self._registry.until(
            lambda: self._registry.versions.newer(than, run, readable=readable), timeout_s
        )

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """Trinity's: wait for a version newer than ``current_version``.

        The explorer's status is ``require_sync`` meanwhile. The wait also ends if the trainer stops
        or dies, calls `notify_no_new_model_state_dict`, or lets ``sync_timeout`` pass.

        Args:
            current_version: step of the version that the explorer has.
            no_wait: return at once.
            explorer: name of the explorer; by default the one in the settings.

        Returns:
            Step of the newest version, which is ``current_version`` if there is no newer one.
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
        """Trinity's: return the step of the newest version; 0, the base model, if there is none."""
        return self._registry.number

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Trinity's: return the folder of the newest committed weights; None if there is none.

        Args:
            use_huggingface: return its ``huggingface`` folder, if it has full weights.
        """
        role = self._settings.role
        path = await asyncio.to_thread(
            find_model_path, self._root, role, use_huggingface=use_huggingface
        )
        return str(path) if path else None

    async def get_model_state_dict(self) -> tuple[dict[str, Any] | str | None, int]:
        """Trinity's: return what `set_model_state_dict` was given last, and its step.

        Without a state dict, as after a restart, it is None and the step of the newest version,
        which is then read from memory or from its commit.
        """
        step, state = self._state
        if isinstance(state, dict):
            values = await asyncio.gather(*state.values())
            return dict(zip(state, values, strict=True)), step
        return state, step if state else self._registry.number

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Trinity's: yield the state dict one tensor at a time, as a stream of Ray references.

        Raises:
            ConfigError: `set_model_state_dict` was given a path.
        """
        state = self._state[1]
        if isinstance(state, str):
            raise ConfigError(f"the newest weights are at {state}; load them from there")
        for name, reference in (state or {}).items():
            yield name, await reference

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Trinity's: return name, dtype (such as "bfloat16") and shape of each tensor.

        Returns:
            None without a state dict.
        """
        state = self._state[1]
        if not isinstance(state, dict):
            return None
        found = []
        for name, reference in state.items():
            tensor = await reference
            found.append((name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape)))
        return found

    async def set_serving(self, reader: str, step: int | None, run: int | None = None) -> None:
        """Record the version that a reader serves.

        Args:
            reader: its name.
            step: the version's step; None if the reader has stopped serving.
            run: the version's run; by default the newest that has the step.
        """
        if step is None:
            self._registry.versions.remove_reader(reader)
        else:
            self._registry.versions.set_serving(reader, step, self._registry.now(), run)
        await self._registry.save()

    async def readers(self) -> tuple[Reader, ...]:
        """Return the version that each reader serves, and its staleness."""
        return self._registry.versions.readers(self._registry.now())

    async def _follow_commits(self) -> None:
        async for _ in self._registry.commits():
            self._on_newer_commit()

    def _on_newer_commit(self) -> None:
        """Handle a commit that is the newest of the job; subclasses override it."""

    # Status of trainer and explorers

    async def set_explorer_status(
        self, status: Any, old_status: Any = None, explorer: str | None = None
    ) -> None:
        """Trinity's: set the status of an explorer.

        Args:
            status: running, require_sync or stopped, as Trinity's enum or its value.
            old_status: not used; a status belongs to the explorer, not to a count.
            explorer: name of the explorer; by default the one in the settings.

        Raises:
            ConfigError: there is no such status.
        """
        name = explorer or self._settings.explorer
        self._registry.barrier.set_explorer(name, Status.parse(status))
        self._in_background(self._record_actor(name))
        await self._registry.notify()

    async def get_trainer_status(self) -> Status:
        """Trinity's: return the status of the trainer."""
        return self._registry.barrier.trainer

    async def get_explorer_status_counts(self) -> dict[Status, int]:
        """Trinity's: return the number of explorers in each status."""
        return dict(self._registry.barrier.counts)

    async def explorers(self) -> dict[str, Status]:
        """Return the status of each known explorer, by name."""
        return dict(self._registry.barrier.explorers)

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Trinity's: return whether the trainer requires a sync; None if it has stopped."""
        trainer = self._registry.barrier.trainer
        return None if trainer is Status.STOPPED else trainer is Status.REQUIRE_SYNC

    async def explorer_requires_sync(self) -> bool:
        """Trinity's: return whether any explorer requires a sync."""
        return self._registry.barrier.counts[Status.REQUIRE_SYNC] > 0

    async def stop(self) -> None:
        """Stop the actor without a restart; its state stays in ``state.json``."""
        import ray

        await asyncio.to_thread(address_path(self._root).unlink, missing_ok=True)
        ray.actor.exit_actor()


def find_synchronizer(root: str | Path) -> Any | None:
    """Return the Synchronizer of the job at ``root`` if this process is in its Ray cluster."""
    address = read_address(root) if in_ray_cluster() else None
    return _get_actor_at(address) if address else None


def _put_tensors(state: dict[str, Any]) -> dict[str, Any]:
    import ray

    return {
        name: value if isinstance(value, ray.ObjectRef) else ray.put(value)
        for name, value in state.items()
    }


def _resolve_name(root: str, namespace: str | None, name: str) -> tuple[str, str]:
    """Return name and namespace of the root's actor, which is unique, running or not."""
    address = read_address(root)
    if address is None or _get_actor_at(address) is None:
        return name, namespace or NAMESPACE
    if namespace and address.namespace != namespace:
        raise ConfigError(
            f"the Synchronizer of {root} is in Ray namespace {address.namespace!r}, not in "
            f"{namespace!r}; pass that namespace, or none, or stop that Synchronizer"
        )
    return address.name, address.namespace


def _get_actor_at(address: Address) -> Any | None:
    import ray

    try:
        return ray.get_actor(address.name, address.namespace)
    except ValueError:
        return None


def _get_only_actor(namespace: str) -> Any:
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
