"""The back end ``trinity_sync`` of veRL's weight transfer: versions that can be read at any time.

The trainer's rank 0 publishes the full tensors in its node's shared memory, as a version of the
role `ROLE`, and waits for no reader. A rollout worker reads one version, whole: the step that it is
told to (`receive_weights`), or later the newest there is (`get_weights`), also after the trainer
has died.

veRL exchanges metadata before each update. Here it tells the workers which run sends, so weights
that an earlier start left under the same step are not taken for new ones; and the Synchronizer, for
workers on other nodes.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWithCache
from verl.utils.device import get_device_id

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.run_context import find_run_key, make_run_key
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.layout import refuse_url
from trinity_sync.settings import Settings
from trinity_sync.weights.committed import find_committed_version
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.ray_cluster import find_synchronizer, in_ray_cluster
from trinity_sync.weights.reader import WeightReader, make_reader_name
from trinity_sync.weights.sync_barrier import SyncSettings
from trinity_sync.weights.synchronizer import Synchronizer
from trinity_sync.weights.versions import Version

ROLE = "rollout"
"""Role of the versions: full tensors with the rollout's names. The shards of ``actor`` differ."""
ROOT = "TRINITY_SYNC_ROOT"
"""Variable with the job's root, which the switch for veRL's trainers sets."""
RUN_KEY = "TRINITY_SYNC_RUN_KEY"

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class SenderInfo:
    """What the trainer's rank 0 tells all workers before an update."""

    run: int
    newest: int | None
    """The last step that the run has sent; None before the first."""
    synchronizer: Any
    """The job's Synchronizer, a Ray actor; None outside of a Ray cluster."""


@CheckpointEngineRegistry.register("trinity_sync")
class TrinitySyncCheckpointEngine(CheckpointEngineWithCache):
    """Sends and receives the weights of one job; veRL makes one in each worker.

    Its arguments, but the first two, are those of ``checkpoint_engine.engine_kwargs.trinity_sync``.

    Args:
        bucket_size: not used.
        is_master: whether this is rank 0 of the trainer.
        root: the job's root, the same for trainer and rollouts; by default ``TRINITY_SYNC_ROOT``,
            which the switch sets to ``trainer.default_local_dir``.
        commit: also commit each version as a weights-only step, for rollouts to read from disk once
            the trainer's shared memory is gone.
        timeout_s: seconds for which `receive_weights` waits for the trainer.

    Attributes:
        version: the version that this worker has read last; None before the first.

    Raises:
        ConfigError: there is no root, or it is a URL.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        root: str | Path | None = None,
        commit: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        root = root or os.environ.get(ROOT)
        if not root:
            raise ConfigError(
                "the checkpoint engine trinity_sync does not know the job's root; set rollout."
                "checkpoint_engine.engine_kwargs.trinity_sync.root to trainer.default_local_dir, "
                "or start veRL with VERL_USE_EXTERNAL_MODULES=trinity_sync.integrations.verl.switch"
            )
        refuse_url(root)
        self.root = Path(root).resolve()
        self.is_master = is_master
        self.version: Version | None = None
        self._commit = commit
        self._timeout_s = timeout_s
        self._sender: _Sender | None = None
        self._sender_info: SenderInfo | None = None
        self._synchronizer: Any = None
        self._reader: WeightReader | None = None
        """Reader of ``_synchronizer``, or of files if that is None."""
        self._name = make_reader_name("verl")
        if is_master:  # saves through trinity_sync in this process are of the same run
            os.environ.setdefault(RUN_KEY, find_run_key(self.root) or make_run_key())

    # ------------------------------------------------------------ around an update

    def prepare(self) -> dict[str, Any]:
        """Return this worker's root and, on the trainer's rank 0, the `SenderInfo`."""
        sender = self._get_sender().describe() if self.is_master else None
        return {"root": str(self.root), "sender": sender}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what each worker is told: the sender's info; nothing connects them.

        ``metadata`` is what `prepare` returned in each worker, the trainer's ranks first.

        Raises:
            ConfigError: the workers have different roots.
        """
        roots = {each["root"] for each in metadata}
        if len(roots) > 1:
            raise ConfigError(
                f"trainer and rollout workers have different roots: {', '.join(sorted(roots))}; "
                "set checkpoint_engine.engine_kwargs.trinity_sync.root to one absolute path"
            )
        sender = next((each["sender"] for each in metadata if each["sender"]), None)
        return {"sender": [sender] * actor_wg_world_size}, {"sender": [sender] * rollout_world_size}

    def init_process_group(self, sender: SenderInfo | None) -> None:
        """Note which run sends the next update; there is no process group."""
        self._sender_info = sender

    def finalize(self) -> None:
        """Do nothing: memory stays mapped for the next update."""

    # ------------------------------------------------------------ trainer

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Publish the weights as a version; every rank of the trainer calls it.

        Returns once readers can open it, and waits for none of them. Other ranks than 0 only take
        part in the collectives of ``weights``.

        Args:
            weights: names and full tensors, each valid until the next is taken.
            global_steps: step of the version, not below the last one of this run. None stands for
                the last step again, with the same weights; at first for 0.

        Raises:
            ConfigError: the step is below the last one, or the last step is sent again with other
                weights.
            SpoolFullError: shared memory has no room for the version.
            WeightSyncError: the version could not be published.
        """
        if not self.is_master:
            for _ in weights:
                pass
            return
        sender = self._get_sender()
        step = sender.collect(weights, global_steps)
        await asyncio.to_thread(sender.publish, step)

    def _get_sender(self) -> "_Sender":
        if self._sender is None:
            self._sender = _Sender(self.root, commit=self._commit)
        return self._sender

    # ------------------------------------------------------------ rollout workers

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Yield names and full tensors of the version of a step, and of no other.

        Tensors are on this worker's device. On the CPU they are views of the trainer's memory:
        valid until the generator ends, and not to be written to.

        Args:
            global_steps: step to wait for. None stands for the sender's last step, as in
                `send_weights`; without a preceding `init_process_group`, for the newest version.

        Raises:
            WeightSyncError: the step is not published within ``timeout_s``, or is gone: the trainer
                has published a later one.
        """
        sender = self._sender_info
        step, run = global_steps, sender.run if sender else None
        if step is None and sender:
            step = sender.newest or 0
        before = -1 if step is None else step - 1
        than = before if run is None else Version(before, run, "memory", str(self.root), ROLE)
        version = await self._open_job().wait_newer(than, self._timeout_s)
        if version is None:
            wanted = "any step" if step is None else f"step {step}"
            raise WeightSyncError(
                f"{wanted} of {self.root} is not published after {self._timeout_s:g} s; does the "
                "trainer send it, and does this worker see its root or join its Ray cluster? "
                "Raise engine_kwargs.trinity_sync.timeout_s if the trainer needs longer"
            )
        async for named in self._read(self._select(version, step, run)):
            yield named

    async def get_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Yield names and full tensors of the newest version there is; waits for nothing.

        The trainer takes no part in it. Workers of one tensor-parallel replica have to read the
        same version: ask one of them for `newest_step`, and pass it to all.

        Args:
            global_steps: the only step to accept.

        Raises:
            WeightSyncError: nothing was published yet, or the newest version is of another step.
        """
        version = await self._find_newest()
        if version is None:
            raise WeightSyncError(
                f"nothing is published in {self.root} that this worker can read; call it after the "
                "trainer's first update_weights"
            )
        async for named in self._read(self._select(version, global_steps)):
            yield named

    async def newest_step(self) -> int | None:
        """Return the step that `get_weights` would yield now; None if there is none."""
        version = await self._find_newest()
        return version.step if version else None

    async def _find_newest(self) -> Version | None:
        return await self._open_job().wait_newer(-1, 0.0)

    def _select(self, newest: Version, step: int | None, run: int | None = None) -> Version:
        """Return the newest version if it is the wanted one, otherwise that one's commit."""
        found: Version | None = newest
        if step is not None and step != newest.step:
            found = find_committed_version(self.root, ROLE, step)
        if found and run in (None, found.run):
            return found
        raise self._explain_gone(f"step {step}", newest)

    async def _read(self, wanted: Version) -> AsyncIterator[Named]:
        reader = self._open_job()
        device = get_device_id()
        with ExitStack() as opened:
            # in a thread, since images of other nodes are fetched
            view = await asyncio.to_thread(opened.enter_context, reader.open(wanted))
            found = view.version
            if (found.run, found.step) != (wanted.run, wanted.step):
                raise self._explain_gone(f"step {wanted.step}", found)
            for name, tensor in view.iter_views():
                yield name, tensor.to(device)
        self.version = found

    def _explain_gone(self, wanted: str, newest: Version) -> WeightSyncError:
        return WeightSyncError(
            f"{wanted} of {self.root} is gone, or of another run: the newest version is step "
            f"{newest.step} of run {newest.run}; update to that one"
        )

    def _open_job(self) -> WeightReader:
        """Return the reader: of the Synchronizer once there is one, otherwise of files."""
        told = self._sender_info.synchronizer if self._sender_info else None
        found = told or find_synchronizer(self.root)
        if self._reader is None or found != self._synchronizer:
            self._synchronizer = found
            self._reader = WeightReader(found, root=self.root, role=ROLE, name=self._name)
        return self._reader


class _Sender:
    """The trainer's rank 0: keeps the tensors of the last update, and publishes them.

    The memory for them is kept between updates: new memory costs more than the copy into it.
    Commits are requested by ``trigger``.
    """

    def __init__(self, root: Path, *, commit: bool, trigger: SaveTrigger | None = None) -> None:
        settings = Settings()
        if not commit:
            trigger = SaveTrigger(settings)  # one of its own is not warned that there is no stack
        self._commit = commit
        self._coordinator = CheckpointCoordinator(
            root, roles=(ROLE,), settings=settings, trigger=trigger
        )
        self._kept: dict[str, torch.Tensor] = {}
        self._newest: int | None = None
        """Step that was published last."""
        self._synchronizer: Any = None
        self._publisher: Publisher | None = None
        if in_ray_cluster():
            self._synchronizer = Synchronizer.get_actor(root=root, settings=SyncSettings(role=ROLE))
            spool = self._coordinator.spool
            self._publisher = Publisher(self._synchronizer, self._coordinator.root, spool)

    def describe(self) -> SenderInfo:
        """Return what the workers are told."""
        return SenderInfo(self._coordinator.begin(), self._newest, self._synchronizer)

    def collect(self, weights: Iterable[Named], step: int | None) -> int:
        """Copy the weights to the host, and return their step.

        All of ``weights`` is taken in any case, since other ranks wait in its collectives.
        """
        before = self._kept
        self._kept = {name: _copy_into(before.pop(name, None), tensor) for name, tensor in weights}
        return (self._newest or 0) if step is None else step

    def publish(self, step: int) -> None:
        """Copy what is kept into shared memory, submit its commit, and tell the Synchronizer.

        Raises:
            ConfigError: as in `TrinitySyncCheckpointEngine.send_weights`.
            SpoolFullError, WeightSyncError: it cannot be published.
        """
        published, staged = self._coordinator.upload(step, lambda: self._kept, role=ROLE)
        if published is None:
            problem = staged.failure or "the log says why"
            raise WeightSyncError(f"step {step} of {self._coordinator.root}: {problem}")
        self._newest = step
        if self._commit:
            self._coordinator.save(step, {"model": self._kept}, role=ROLE, kind="state_dict")
        if self._publisher:
            self._publisher.publish(published)
            self._publisher.wait()


def _copy_into(memory: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory.copy_(tensor.detach())
