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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, StackError, WeightSyncError
from trinity_sync.layout import job_id_of
from trinity_sync.weights.ray_cluster import (
    NAMESPACE,
    get_only_actor,
    require_ray,
    resolve_actor_name,
)
from trinity_sync.weights.state_files import address_path, read_address, write_address
from trinity_sync.weights.sync_barrier import Status, SyncSettings
from trinity_sync.weights.trinity_methods import TrinityMethods
from trinity_sync.weights.versions import Reader, Source, Version, VersionUnavailableError


class Synchronizer(TrinityMethods):
    """Ray actor that knows the versions of a job's weights, and which reader serves which.

    Get it with `get_actor`, and call its methods as those of any Ray actor::

        synchronizer = Synchronizer.get_actor(root="ckpts")
        version = await synchronizer.wait_newer.remote(40, timeout_s=60.0)

    It is needed for readers on other nodes than the trainer's, for broadcasts, and for Trinity-RFT,
    whose Synchronizer's methods it has. It is detached: it lives until `stop`, and is named after
    the job.
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
            return get_only_actor(namespace or NAMESPACE)
        root = str(Path(root).resolve())
        name, namespace = resolve_actor_name(root, namespace, cls.name_for(root))
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
        for once in (cls.stop, cls.get_model_state_dict_iterator):
            ray.method(max_task_retries=0)(once)  # a retry restarts it, or has other tensors
        actor = ray.remote(cls).options(**options).remote(root, name, namespace, settings)
        actor.restore_address.remote()  # the root of a running actor may have been recreated
        return actor

    @classmethod
    def name_for(cls, root: str) -> str:
        """Return the name of the Ray actor of the job at ``root``."""
        return f"synchronizer-{job_id_of(Path(root).resolve())}"

    def __init__(self, root: str, name: str, namespace: str, settings: SyncSettings) -> None:
        self._root, self._name, self._namespace = root, name, namespace
        write_address(root, name, namespace)
        super().__init__(root, namespace, settings)
        self._copies: dict[str, list[Any]] = {}
        """References of the copies of images of the newest version in memory, by image name."""
        self._registry.run_in_background(self._registry.follow_commits())

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

        Args:
            version: version in memory or committed.

        Returns:
            Whether it is the newest version now.

        Raises:
            ConfigError: the version is of another role than this Synchronizer's.
        """
        self._require_role(version)
        await self._registry.refresh()
        is_newest = await self._registry.record(version)
        newest = self._registry.versions.newest("memory")
        names = {image.image for image in newest.images} if newest else set()
        self._copies = {name: refs for name, refs in self._copies.items() if name in names}
        return is_newest

    async def add_images(self, version: Version, world_size: int, timeout_s: float) -> None:
        """Add one rank's image of a version, which is published once all ranks have added theirs.

        Returns once this version, or a newer one, is published; waits ``timeout_s`` for the images
        of all ``world_size`` ranks. Ray repeats the calls that were in flight when this actor was
        killed, so no image is lost with it.

        Raises:
            ConfigError: the version is of another role than this Synchronizer's.
            WeightSyncError: ranks did not add their images in time; the message names them.
        """
        self._require_role(version)
        try:
            complete = await self._registry.add_images(version, world_size, timeout_s)
        except WeightSyncError:
            await self._end_waits_for(version)
            raise
        if complete:
            await self.publish(complete)

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
        """Return references of version tag and bytes of the ranks' images, the same to all callers.

        Raises:
            VersionUnavailableError: the version is not the newest in memory.
        """
        from trinity_sync.weights.actor_registry import start_copy  # imports Ray

        newest = self._registry.versions.newest("memory")
        if newest is None or (newest.run, newest.step) != (run, step):
            raise VersionUnavailableError(
                f"version {step} (run {run}) is no longer the newest in memory"
            )
        images = {image.rank: image for image in newest.images}
        for image in [images[rank] for rank in ranks]:
            if image.image not in self._copies:
                self._copies[image.image] = start_copy(image)
                self._registry.run_in_background(self._drop_if_failed(image.image))
        return [self._copies[images[rank].image] for rank in ranks]

    async def _drop_if_failed(self, image: str) -> None:
        """Wait for the copy of an image, and have the next reader start another if it fails."""
        try:
            await self._copies[image][0]
        except Exception:  # of the task, or of Ray
            self._copies.pop(image, None)

    def _require_role(self, version: Version) -> None:
        if version.role != self._settings.role:
            raise ConfigError(
                f"step {version.step} is of role {version.role!r}, and the Synchronizer of "
                f"{self._root} serves {self._settings.role!r}; start it with that role in "
                "SyncSettings, or use commits only for the other role"
            )

    async def wait_newer(
        self, than: int | Version, timeout_s: float | None = None, *, readable: bool = False
    ) -> Version | None:
        """Wait for a newer version.

        Args:
            than: version that it has to be newer than, or a step that it has to be beyond. Than a
                version, the same step of a later run is newer, and any step of another job, which
                is in the root now.
            timeout_s: seconds to wait; None waits without limit.
            readable: wait for a version that a reader can open, from memory or a commit.

        Returns:
            The newest version; None at the time-out.
        """
        return await self._registry.until(
            lambda: self._registry.versions.newer(than, readable=readable), timeout_s
        )

    async def set_serving(self, reader: str, step: int, run: int) -> None:
        """Record the version that a reader serves.

        Args:
            reader: its name.
            step: the version's step.
            run: the version's run.
        """
        self._registry.versions.set_serving(reader, step, self._registry.now(), run)
        await self._registry.save()

    async def readers(self) -> tuple[Reader, ...]:
        """Return the version that each reader serves, and its staleness."""
        return self._registry.versions.readers(self._registry.now())

    async def explorers(self) -> dict[str, Status]:
        """Return the status of each known explorer, by name."""
        return dict(self._registry.barrier.explorers)

    async def stop(self) -> None:
        """Stop the actor without a restart; its state stays in ``state.json``."""
        import ray

        await asyncio.to_thread(address_path(self._root).unlink, missing_ok=True)
        ray.actor.exit_actor()
