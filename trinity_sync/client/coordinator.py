"""`CheckpointCoordinator`, which a trainer saves and loads with."""

import asyncio
import os
import signal
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from trinity_sync.client.attachments import Attachments, attachment_path
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.function_runner import FunctionRunner
from trinity_sync.client.init_root import open_root, open_together, resolve_root
from trinity_sync.client.preemption import (
    EmergencySave,
    Preemption,
    noticed_by_any,
    run_emergency_save,
)
from trinity_sync.client.run_context import RunContext, find_start_key, make_run_key
from trinity_sync.client.save_submitter import (
    OBJECTS,
    SaveHandle,
    SaveSubmitter,
    check_components,
    read_states,
    select_own,
)
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.client.state_saver import NOTHING_STAGED, DcpFolders, StateSaver, UploadCheck
from trinity_sync.client.step_loader import StepLoader
from trinity_sync.errors import ConfigError, SaveFailedError, SaveTimeoutError, TrinitySyncError
from trinity_sync.fs.process import hold_handlers
from trinity_sync.layout import (
    COMPONENTS,
    KINDS,
    Kind,
    WriteConcurrency,
    check_name,
    check_number,
    check_seconds,
    check_type,
)
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import Export, Origin, Parent, open_identity, require_root
from trinity_sync.snapshot.spool import JobSpool, open_job_spool, remove_replaced_spools
from trinity_sync.snapshot.stager import Staged, Stager, estimate_nbytes
from trinity_sync.snapshot.ticket import VersionTag
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import read_run_head
from trinity_sync.storage.metrics import MetricsLog
from trinity_sync.storage.placement import NodeRanks, group_by_node
from trinity_sync.storage.restore import load_bytes, restore_folder
from trinity_sync.storage.save_functions import FunctionStatus
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.tensors.in_place import get_live_state

CLOSE_S = 10.0
"""Seconds for which `close` wakes the saver for what was just submitted."""


class CheckpointCoordinator:
    """Saves and loads the steps of a job; each rank has one coordinator.

    A save costs the training loop one copy into shared memory. The saver of the
    node, or a stack, then writes the files and commits them. The methods, in the order of use:

    1. The constructor in a job of one process, `of_process_group` on each rank of several.
    2. To resume: `latest_step` and `load`. Where other code loads the step (veRL): `check_resume`
       before it and `resumed_from` after it.
    3. `prewarm`, so that the first save is as fast as the others; `wait_staged_before`, once, if
       saves overlap with training.
    4. At each step to save: `attach` and `record_metrics` where needed, then `save`; `upload` for
       weights that are only synced to rollout workers.
    5. `wait_all`, which raises every failure, and `close`; the ``with`` block calls both.

    `on_preemption`, `any_preempted` and `emergency_save` save a last step before the scheduler ends
    the process. `save_async`, `save_sync` and `register_and_monitor` commit what a function of the
    user writes, with the signatures of Trinity's trainer.

    In a forked child, `close` and leaving the ``with`` block do nothing, and methods that save,
    load or wait raise `ConfigError`.

    Args:
        root: the job's folder (Trinity's ``checkpoint_job_dir``); steps go to
            ``root/global_step_{N}/{role}/``. It is created if it is missing.
        rank: rank of this process.
        world_size: number of ranks that save together.
        places: ranks of each node; by default all ranks are on this node. A caller that passes them
            has opened the root, as `of_process_group` does.
        run_key: key that all processes of this run share; a random part is added, which stays the
            same while any of them lives. By default ``TRINITY_SYNC_RUN_KEY``, or a random key.
            Roles that save from separate process groups need it.
        roles: roles that make one checkpoint together; by default those of the settings.
        job: settings of the job to write into the root, by name as in
            `trinity_sync.storage.job_settings.JobSettings`, such as ``{"keep": "last=3"}``. Rank 0
            writes them; those that are not named stay as they are.
        settings: by default read from the environment.
        trigger: wakes the saver of this node, which also requests the flow runs of the Prefect
            server that ``PREFECT_API_URL`` or the local stack's state file names, if one does.
        require_stack: query that server first, and raise if it cannot take saves.
        take_over: supersede an earlier run of the job that is still running; by default
            ``TRINITY_SYNC_TAKE_OVER``. Otherwise the first call that begins this run (`load`,
            `save`, `upload`) waits for that run to end, and raises `RootInUseError` if it does not.

    Raises:
        ConfigError: an argument is invalid.
        RootError: the root's file system lacks an operation that a commit needs.
        SpoolError: the spool folder cannot be used.
        PrefectApiError: with ``require_stack``: no server is known, or it does not answer within 5
            seconds, refuses the password or has no deployment of saves.

    Example::

        with CheckpointCoordinator("ckpts") as saves:
            for step in range(1, 1001):
                train_one_step()
                if step % 10 == 0:
                    saves.save(step, {"model": model.state_dict(), "optim": optim.state_dict()})
    """

    def __init__(
        self,
        root: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        places: Sequence[NodeRanks] = (),
        run_key: str | None = None,
        roles: Sequence[str] | None = None,
        job: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
        trigger: SaveTrigger | None = None,
        require_stack: bool = False,
        take_over: bool | None = None,
    ) -> None:
        self._process = os.getpid()
        rank, world_size = check_number("rank", rank), check_number("world size", world_size)
        if not rank < world_size:
            raise ConfigError(f"rank {rank} is not below the world size {world_size}")
        self.rank, self.world_size = rank, world_size
        check_type("settings", settings, Settings | None, "Settings(...)")
        check_type("run_key", run_key, str | None, "a text")
        self.settings = settings = settings or Settings()
        check_type("roles", roles or (), Collection, "a list, such as ['actor', 'critic']")
        self.roles = tuple(check_name("role", role) for role in roles or settings.roles)
        requests = trigger or SaveTrigger(settings)
        opens = rank == 0 and not places
        if opens and require_stack:
            requests.require_stack()
        self.root = open_root(root, job) if opens else resolve_root(root)
        identity = open_identity(self.root)
        self.spool: JobSpool = open_job_spool(settings.spool, self.root)
        if rank == 0 and trigger is None and not require_stack:
            requests.warn_without_stack(self.root, self.spool.folder)
        # of the caller: rank 0 may not have written it yet
        concurrency = (job or {}).get("write_concurrency")
        concurrency = concurrency or read_job_settings(self.root).write_concurrency
        here = (settings.node, str(self.spool.folder.absolute()))
        self._places = tuple(places) or group_by_node([here] * world_size)
        if any(place.ranks[0] == rank for place in self._places):  # one rank of each node
            remove_replaced_spools(self.spool)
            self.spool.away.unlink(missing_ok=True)
        run_key = run_key or settings.run_key or make_run_key()
        if not places:  # otherwise rank 0 has told it to all ranks
            run_key = find_start_key(self.root, run_key)
        self.spool.mark_run(run_key)
        take_over = settings.take_over if take_over is None else take_over
        self._run = RunContext(self.root, run_key, leads=rank == 0, takes_over=take_over)
        self._make_collaborators(requests, identity, concurrency)
        self._has_waited = False
        """Whether an emergency save has waited for its commit."""
        self._failures: list[str] = []
        """Failures that no `wait_all` has raised yet."""

    def _make_collaborators(
        self, requests: SaveTrigger, identity: str, write_concurrency: WriteConcurrency
    ) -> None:
        """Make the objects of this process, each with the others that it has."""
        root, settings, rank = self.root, self.settings, self.rank
        here = (root, self.spool, self._run, rank, self.world_size, self._places)
        self._watcher = CommitWatcher(requests, self.spool, rank=rank, run=self._run)
        self._watcher.node_ranks = next(each.ranks for each in self._places if rank in each.ranks)
        self._submitter = SaveSubmitter(
            *here, self._watcher, identity, self.roles, write_concurrency
        )
        self._stager = Stager(
            self.spool,
            slots=settings.slots,
            ranks=sum(len(each.ranks) for each in self._places if each.node == settings.node),
            slot_wait_s=settings.slot_wait_s,
            on_long_wait=self._watcher.hurry,
        )
        self._loader = StepLoader(*here, self._watcher, self._stager)
        self._states = StateSaver(
            self._stager,
            self._submitter.submit_states,
            self._watcher.has_failed,
            self._submitter.prepare,
            check_overlap=settings.overlap == "check",
        )
        self._attachments = Attachments(root, rank, self._states)
        self._functions = FunctionRunner(root, self.spool)
        self._uploads = UploadCheck(root, self.spool)
        self._metrics = MetricsLog(root, self._run.find_run_of_metrics)
        self._preemption = Preemption(settings.save_by)
        dropped = weakref.finalize(self, _end_watcher, self._watcher, os.getpid())
        dropped.atexit = False

    @classmethod
    def of_process_group(
        cls,
        root: str | Path,
        *,
        run_key: str | None = None,
        roles: Sequence[str] | None = None,
        job: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
        trigger: SaveTrigger | None = None,
        require_stack: bool = False,
        take_over: bool | None = None,
    ) -> "CheckpointCoordinator":
        """Create a coordinator on each rank of the default process group; a collective call.

        The ranks exchange their nodes, and use rank 0's run key. What resumes these coordinators is
        a collective call, too: `latest_step`, `load`, `check_resume` and `resumed_from`. Rank 0
        then looks at the root for all ranks, and each rank at its own files.

        Args:
            root, run_key, roles, job, settings, trigger, require_stack, take_over: as in the
                constructor.

        Raises:
            RootError: on all ranks: the root's file system lacks an operation that a commit needs,
                or the nodes do not share the root.
            ConfigError, RemoteError, PrefectApiError: on all ranks: what rank 0's constructor
                raises.
        """
        settings = settings or Settings()
        check = (trigger or SaveTrigger(settings)).require_stack if require_stack else None
        run_key = run_key or settings.run_key or make_run_key()
        places, key = open_together(root, settings, run_key, job=job, check=check)
        made = cls(
            root,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            places=places,
            run_key=key,
            roles=roles,
            job=job,
            settings=settings,
            trigger=trigger,
            require_stack=require_stack,
            take_over=take_over,
        )
        made._loader.is_collective = True
        return made

    @property
    def run(self) -> int:
        """Number of this run of the job; 0 until this process has begun it.

        It begins with the first `save`, `upload` or save function, with `load`, `resumed_from` or
        `begin`, and with no other call.
        """
        return self._run.number

    @property
    def parents(self) -> tuple[Parent, ...]:
        """Steps that this run began from; none until this process has begun it.

        That is the step that it resumed from; otherwise those that the process which began it had
        loaded with `Checkpoints`, after it had made this coordinator: also of other roots, such as
        a merge.
        """
        return self._run.parents

    def begin(self) -> int:
        """Begin this run now, at step 0 unless it has resumed, and return its number.

        The first save does so too. Called before the training, a second start of the same training
        is refused before it computes anything.

        Raises:
            RootInUseError: an earlier run is still running, and ``take_over`` is not set.
            ConfigError: this process is a forked child.
        """
        self._require_own_process()
        return self._run.get().number

    # ------------------------------------------------------------ resuming

    def latest_step(
        self, kind: Kind = "checkpoint", *, settle_s: float = 60.0, healthy: bool = False
    ) -> int | None:
        """Return the number of the newest committed step, or None if there is none.

        A collective call after `of_process_group`: all ranks get the step that rank 0 finds, or the
        same error.

        Args:
            kind: ``checkpoint`` for a step to resume from, ``state_dict`` for weights.
            settle_s: seconds to wait first for saves of an earlier run that are in flight on the
                nodes of these ranks; resuming from an older step would supersede them. The saver
                is started for them: that of a killed job may be killed as well. Once this run has
                begun, nothing is awaited.
            healthy: whether to leave out steps whose weights or optimizer have values that are NaN
                or infinite.

        Raises:
            ConfigError: the kind is unknown.
            FormatError: another release has committed the newest step.
        """
        return self._loader.latest_step(kind, settle_s, healthy)

    def load(
        self, step: int | str, *, role: str = "actor", only: str | Sequence[str] = ()
    ) -> dict[str, Any]:
        """Load this rank's states of a committed step, from which this run then resumes.

        To load a step for an evaluation, use `Checkpoints`, which begins no run.

        The states are read from the spool if this node still holds them, otherwise from disk; the
        log says which. After an error the run has not resumed, so another step may be loaded. A
        collective call after `of_process_group`: if one rank cannot load the step, all ranks raise
        its error.

        Args:
            step: training step, or a word as of the command: ``latest``, ``latest~1``, ``healthy``,
                ``best=val_loss:min`` or a tag, once saves in flight are committed.
            role: role whose states are loaded.
            only: components to load, such as ``("model",)``; by default all. The others are not
                read, and the run's record says which.

        Returns:
            State by component (``model``, ``optim``, ``extra_state``), as ``torch.load`` returns
            it: tensors on the CPU with the shapes and dtypes that this rank saved, and DTensors on
            this process's own mesh, if it has an equal one.

        Raises:
            CommitError: the step is not committed, has no shards for this rank, or is corrupted.
            ConfigError: as in `check_resume`, or the step has not all components of ``only``.
            RootInUseError: as in `check_resume`.
        """
        step = self._loader.resolve(step)
        self.check_resume(step, only=only)
        return self._loader.load(step, role, only)

    def load_into(
        self,
        step: int | str,
        states: Mapping[str, Any] | torch.nn.Module,
        *,
        role: str = "actor",
        only: str | Sequence[str] = (),
    ) -> dict[str, Any]:
        """Fill live tensors with this rank's states of a committed step, and resume from it.

        As `load`, but what is in ``states`` is filled in place, which takes one copy and no memory
        of its own::

            loaded = saves.load_into(step, {"model": model, "optim": optimizer})
            scheduler.load_state_dict(loaded["extra_state"])

        Args:
            step: as in `load`.
            states: live state by component, of the structure that was saved, such as
                ``model.state_dict()``, or the module; a module alone is ``model``. Its tensors are
                filled, on their devices; a DTensor's shard is. Any other object, such as an
                optimizer or a module whose state has copies (FSDP1), gets its state by its
                ``load_state_dict``. Components that are left out
                are loaded into new memory, as by `load`.
            role: role whose states are loaded.
            only: as in `load`; those of ``states`` are among them.

        Returns:
            State by component, as from `load`, with the live tensors in it. All other values, such
            as learning rates, are in it alone: pass it to ``load_state_dict`` where they matter.

        Raises:
            ConfigError: as `check_resume`; or the step has no such component, or other tensors, by
                name, shape, dtype or placement, or unlike values for tensors that share memory, on
                any rank: nothing was changed.
            CommitError, RootInUseError: as `load`. An error of a corrupted file says which
                components have changed.
        """
        given = {"model": states} if isinstance(states, torch.nn.Module) else states
        step = self._loader.resolve(step)
        check_type("states", given, Mapping, "a dict: {'model': model.state_dict()}")
        live = {name: get_live_state(each) for name, each in given.items()}
        for name, each in given.items():
            inner = [*each.values()] if isinstance(each, dict) else each
            if isinstance(inner, list) and any(isinstance(one, OBJECTS) for one in inner):
                raise ConfigError(
                    f"load_into fills no objects in a dict or list, which {name} has; leave "
                    f"{name} out, and pass what load_into returns of it to their load_state_dict"
                )
        self.check_resume(step, only=only)
        return self._loader.load(step, role, only, live)

    def open(
        self, step: int | str, *, role: str = "actor"
    ) -> AbstractContextManager[dict[str, Any]]:
        """Open this rank's states of a committed step in place, and resume from it.

        As `load`, but if this node still holds the states in memory, the tensors are views of it,
        for code that copies from them itself::

            with saves.open(step) as states:
                engine.load_weights(states["model"].items())

        All files are compared with their digests before the block begins. Within it, the tensors
        keep their values while training saves on, and what is written to them does not change the
        step. They must not be used after it.

        Args:
            step: as in `load`.
            role: role whose states are opened.

        Returns:
            Context manager of the state by component, as from `load`.

        Raises:
            CommitError, ConfigError, RootInUseError: as `load`, at the begin of the block.
        """
        step = self._loader.resolve(step)
        self.check_resume(step)
        return self._loader.open(step, role, {})

    def check_resume(self, step: int, *, only: Sequence[str] = ()) -> None:
        """Check that this run can resume from a step, before other code loads it.

        `load` includes this check. A collective call after `of_process_group`. ``only`` is as in
        `load`.

        Raises:
            ConfigError: this run has already begun at another step, or its key was used by an
                earlier run.
            RootInUseError: an earlier run is still running, and ``take_over`` is not set.
            CommitError: retention has kept nothing but the weights of the step.
        """
        step = check_number("step", step)
        # what is loaded next must not reach an image
        self._loader.require_can_begin_at(step, self.wait_staged, whole=not only)

    def resumed_from(self, step: int) -> None:
        """Record that this run resumes from a step that other code than `load` has loaded.

        Saves of earlier runs beyond the step that are not committed yet are superseded. A
        collective call after `of_process_group`.

        Raises:
            ConfigError, RootInUseError: as in `check_resume`.
        """
        step = check_number("step", step)
        self.check_resume(step)
        self._loader.begin_at(step)
        self._loader.prewarm_as(step)

    def attachment(self, step: int, name: str, *, rank: int | None = None) -> bytes:
        """Return what a rank attached to a committed step.

        Args:
            step: training step.
            name: name of the attachment.
            rank: rank that attached it; by default this rank.

        Raises:
            CommitError: the step is not committed, is corrupted, or has no such attachment.
            ConfigError: the name is invalid.
        """
        rank = self.rank if rank is None else check_number("rank", rank)
        return load_bytes(self.root, check_number("step", step), attachment_path(name, rank))

    def restore_folder(self, step: int, name: str, to: str | Path, *, role: str = "") -> None:
        """Copy a folder that this rank attached to a committed step, to go on from.

        Args:
            step: training step.
            name: name of the folder, as in `attach_folder`.
            to: folder to copy it to, new or empty: the step's own files must not change.
            role: role of a `Participant` that saved the folder.

        Raises:
            CommitError: the step is not committed, is corrupted, or has no such folder.
            ConfigError: the name is invalid, or ``to`` has files or cannot be written.
        """
        check_type("to", to, str | Path, "a new folder")
        path = f"{role}/{name}" if role else attachment_path(name, self.rank)
        step = check_number("step", step)
        with lease_to_read(self.root, step, "restore of a folder") as manifest:
            restore_folder(self.root, manifest, path, Path(to))

    # ------------------------------------------------------------ shared memory

    def prewarm(
        self,
        sizes: Mapping[str, int | torch.nn.Module | torch.optim.Optimizer],
        *,
        role: str = "actor",
    ) -> None:
        """Touch the memory of the first save beside the training: it is then as fast as later ones.

        It returns at once, and logs the bytes that all slots of this node's ranks need; the saver
        starts as well. A run that has resumed does so by itself, with the sizes of its step::

            saves.prewarm({"model": model, "optim": optimizer})

        Args:
            sizes: by component, the size of this rank's image in bytes, or the module or optimizer
                whose state it is to have.
            role: role of the images.

        Raises:
            SpoolFullError: one slot each does not fit; the message says how many bytes are needed.
        """
        self._require_own_process()
        check_components("prewarm", sizes, COMPONENTS)
        self.wait_staged()
        images = [(role, name, self.rank, estimate_nbytes(size)) for name, size in sizes.items()]
        self._stager.require_room(sum(nbytes for *_, nbytes in images))
        self._stager.memory.map_slots(lambda: images)
        self._watcher.start_saver()

    # ------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        components: Mapping[str, Any],
        *,
        role: str = "actor",
        kind: Kind = "checkpoint",
        metadata: str | Path | Mapping[str, bytes | Path] | None = None,
        overlap: bool = False,
        keep: int = 0,
        export: Export = "",
        replicated: Collection[str] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Submit the states of a step; the save commits even if this process then dies.

        Every rank calls it, for every role, with the same ``step`` and ``kind``. A component that
        was submitted at this step before (the model, for a sync) is not copied again, unless it has
        changed since, of which a sample tells on a GPU; then the save fails, which `wait_all`
        raises. A save that has failed is submitted again. Handlers of signals that come meanwhile
        are called once the save is submitted, or while it waits for a slot.

        Args:
            step: training step, from 0 on, of any integral type.
            components: this rank's state by component (``model``, ``optim``, ``extra_state``):
                anything that ``torch.save`` accepts, with tensors of any shape, dtype and device
                and DTensors. Of a module, an optimizer, a scheduler or the like, also in a dict or
                a list, it is its ``state_dict()``.
            role: role of the states; they become files in ``global_step_{step}/{role}/``.
            kind: ``checkpoint`` for all components, ``state_dict`` for the weights of a sync.
            metadata: small files to commit with the shards, by path below the role's folder, or a
                folder of them; only rank 0's are used, of the step's first save. A folder is read
                once: pass a new one when its content has changed. A path is that of a file, which
                may be large: as of `attach_folder`.
            overlap: return before large tensors are copied; a thread copies them during the next
                forward and backward pass. They must not change before `wait_staged`, which
                `wait_staged_before` calls, and the save is not submitted until then. A detected
                change fails the save; ``TRINITY_SYNC_OVERLAP=check`` detects all changes.
            keep: number of checkpoints to keep once this one is committed, this one included; 0 for
                all. Older ones are removed after the commit, never before, and none that a policy
                set for the job keeps.
            export: once the step is committed, also write the model's FSDP shards as a Hugging Face
                model into ``<role>/huggingface/``. `wait_all` waits for it.
            replicated: components of a ``checkpoint`` that several ranks have alike. Without
                DTensors, as with DDP, rank 0 alone saves them, and the others may leave them out.
                With DTensors, as with HSDP under FSDP2, the first of the ranks with the same shards
                saves them, and its files have the names of all. `load` returns them on all ranks.
                A rank that has nothing else saves an empty ``extra_state``.
            metrics: numbers by name, as for `record_metrics`.

        Returns:
            What was staged, the seconds for which the caller was stalled, and whether the save is
            committed.

        Raises:
            ConfigError: an argument is invalid, or ``step`` is before the newest that this process
                has saved.
            RootInUseError: an earlier run is still running, and ``take_over`` is not set; from the
                call that begins this run.
            SupersededError: a later run has taken over, which rank 0 notices within seconds.
            SpoolError: the first save of this process cannot be written into the spool.
            ImageError: the first save of this process cannot be pickled or copied; the message
                names the key. What fails later, here or in another call that prepares a save, does
                not stop the training: the handle has it as ``failure``, and `wait_all` raises it.
        """
        self._require_own_process()
        step, components = check_number("step", step), read_states(components)
        replicas: dict[str, tuple[int, ...]] = {}
        if replicated:
            components, replicated, replicas = select_own(
                step, components, replicated, kind, self.rank
            )
        self._submitter.check_arguments(step, components, role, kind, export)
        self._run.require_not_superseded(step)
        origin = self._submitter.make_origin(
            step,
            role,
            kind,
            keep=keep,
            export=export,
            replicated=replicated,
            replicas=replicas,
            again=self._run.require_next_step(step, role, kind),
        )
        if metrics is not None:
            self._metrics.record(step, metrics)
        return self._submit(origin, components, metadata, overlap=overlap)

    def _submit(
        self,
        origin: Origin,
        components: Mapping[str, Any],
        metadata: str | Path | Mapping[str, bytes | Path] | None,
        *,
        overlap: bool = False,
        began: float | None = None,
    ) -> SaveHandle:
        """Stage and submit a save whose arguments were checked, with what is attached to it."""
        step, kind = origin.step, origin.kind
        if self._states.lacking and (lost := self._states.fail_without_parts(step, kind)):
            return self._handle(origin, lost)
        if unwritten := self._metrics.flush(step):
            origin = replace(origin, metrics=unwritten)
        try:
            again = self._states.has_saved
            waits = again or bool(self.spool.tickets()[0])  # images of a run that was killed
            self._submitter.prepare(origin.role, again=again, starts=waits)
        except (OSError, TrinitySyncError) as error:
            if not self._states.has_saved:
                raise
            return self._handle(origin, self._states.fail(origin, error))
        attached = None
        self._states.wait_staged()  # which may still fail and leave its attachments
        with hold_handlers():
            try:
                if kind == "checkpoint":
                    attached = self._attachments.take(step, origin.role)
            except OSError as error:
                return self._handle(origin, self._states.fail(origin, error))
            staged = self._states.save(
                origin,
                components,
                metadata=metadata,
                attachments=attached,
                overlap=overlap,
                began=began,
            )
        return self._handle(origin, staged)

    def save_dcp(
        self, step: int, lay_out: Callable[[], DcpFolders], *, role: str = "actor", keep: int = 0
    ) -> SaveHandle:
        """Submit a checkpoint in DCP's format, for `trinity_sync.integrations`.

        Args:
            step, role, keep: as in `save`.
            lay_out: returns this rank's files by component, and the files to commit with rank 0's
                by path below the role's folder. Its error is one of a state that cannot be pickled.

        Returns:
            As `save`.

        Raises:
            ConfigError, SpoolError, ImageError: as in `save`.
        """
        self._require_own_process()
        began = time.perf_counter()
        step = check_number("step", step)
        origin = self._submitter.make_origin(step, role, "checkpoint")
        try:
            files, metadata = lay_out()
        except Exception as error:
            return self._handle(origin, self._states.fail(origin, error))
        self._submitter.check_arguments(step, files, role, "checkpoint", "")
        self._run.require_not_superseded(step)
        again = self._run.require_next_step(step, role, "checkpoint")
        origin = self._submitter.make_origin(step, role, "checkpoint", keep=keep, again=again)
        return self._submit(origin, files, metadata, began=began)

    def wait_staged(self) -> float:
        """Wait until an overlapped save is staged; after that the states may change.

        Returns:
            Seconds for which the caller was stalled.

        Raises:
            SpoolError, ImageError: as in `save`, or a tensor changed before it was copied.
            ConfigError: this process is a forked child.
        """
        self._require_own_process()
        return self._states.wait_staged()

    def wait_staged_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call `wait_staged` before every ``optimizer.step()``; return the hook's handle."""

        check_type("optimizer", optimizer, torch.optim.Optimizer, "the optimizer of the model")

        def wait(*_: Any) -> None:
            if self._is_own:  # a forked child has a copy of the memory
                self.wait_staged()

        return optimizer.register_step_pre_hook(wait)

    def attach(self, name: str, content: str | Path | bytes, *, step: int) -> None:
        """Attach a small file to the checkpoint of a step, such as a dataloader's position.

        Call it before `save` of that step (or the engine's ``save_checkpoint``), which stages it
        with the states. It becomes ``global_step_{N}/attachments/{name}``, and
        ``attachments/rank_{R}/{name}`` for a rank other than 0. If any rank attaches a file, rank 0
        has to attach one as well. With several roles, the role that is saved first takes it.

        Args:
            name: file name; a second call with the same name and step replaces the content.
            content: bytes, or the path of a file, which this call reads.
            step: training step.

        Raises:
            ConfigError: the name is invalid, or this step or a later one has been submitted
                already; before the first save also: the file cannot be read, or is larger than
                256 MiB. Later the save of the step fails with that.
        """
        self._require_own_process()
        self._attachments.add(check_number("step", step), name, content)

    def attach_folder(self, name: str, folder: str | Path, *, step: int) -> None:
        """Attach the files below a folder of any size, e.g. of a queue; otherwise as `attach`.

        `save` reads them into shared memory, which takes as long as a read from the page cache, and
        they become ``global_step_{N}/attachments/{name}/...``. They must not change from this call
        until `save` returns, or with ``overlap`` until `wait_staged`; afterwards they may be
        changed and removed. `restore_folder` gives them back: paths and contents, without modes,
        times and the empty folders below it. Links are followed.

        Args:
            name: name of the folder in the step, as in `attach`.
            folder: folder of files.
            step: training step.

        Raises:
            ConfigError: as `attach`; what cannot be attached is a folder that has anything but
                files, folders and links to them, names of more than 200 bytes, temporary files
                of trinity_sync or NFS, or a link to a folder above it.
        """
        self._require_own_process()
        check_type(f"step {step}: {name}", folder, str | Path, "a folder")
        self._attachments.add_folder(check_number("step", step), name, Path(folder).absolute())

    def attach_written(self, folder: Path, *, step: int) -> None:
        """Attach files that other code has written for a step, on rank 0; otherwise as `attach`.

        They may be large: the commit moves them to the same names below the step's folder. Files
        that are links, or have another name, are copied.

        Args:
            folder: ``global_step_{step}`` in a folder of `adapter.attaching_folder`, complete.
            step: training step.

        Raises:
            ConfigError: the folder is elsewhere, or this step or a later one has been submitted.
        """
        self._require_own_process()
        self._attachments.add_written(check_number("step", step), folder)

    def cut(
        self, step: int, roles: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> float:
        """Have all participants save their state of a step, between two steps of the training.

        Call it before `save` of the step: while it waits, nothing is trained, so that states of all
        roles are those of one moment. A collective call after `of_process_group`; otherwise rank 0
        alone calls it.

        Args:
            step: training step.
            roles: roles of the participants; by default all roles but the first.
            timeout_s: seconds until all of them have to have saved.

        Returns:
            Seconds for which this call has held the training.

        Raises:
            SaveError: a participant has died, or could not save; the message names its role. After
                the first save of this process, each `save` of the step fails with it instead, until
                a cut of the step succeeds.
            SaveTimeoutError: a participant has not saved in time, or has not started; likewise.
            ConfigError: the step is invalid, or this process is a forked child.
        """
        from trinity_sync.client.cut import ask_roles  # of trainings with participants alone

        self._require_own_process()
        began, step = time.perf_counter(), check_number("step", step)
        check_type("roles", roles or (), Collection, "a list, such as ['critic']")
        others = self.roles[1:] if roles is None else roles
        timeout_s = check_seconds("timeout_s", timeout_s)

        def ask() -> None:
            require_root(self.root, self.spool.folder.name)
            ask_roles(self.root, self._run.get().key, step, others, timeout_s)

        with self._states.defer_errors(step, "checkpoint", "cut"):
            self._loader.run_on_rank_0(step, ask)
        return time.perf_counter() - began

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, for policies such as ``best=2:reward:max``.

        Any rank may call it, before or after the step's commit; later calls add to the step's
        metrics. A thread writes them to a small file once the run has begun, and logs an error if
        it cannot. They count for this run, and for the step that it resumed from; an evaluation
        calls `Checkpoints.record_metrics`.

        Args:
            step: training step.
            metrics: numbers by name; a tensor of one element is a number.

        Raises:
            ConfigError: a value is not a number, or a name is empty or has ``:``, ``=`` or a comma.
        """
        self._require_own_process()
        self._metrics.record(check_number("step", step), metrics)

    def upload(
        self, step: int, collect: Any, *, role: str = "actor"
    ) -> tuple[VersionTag | None, Staged]:
        """Publish the weights of a step to readers on this node, without saving them.

        Every rank calls it with the same ``step``. If the step was staged before, readers get that
        image and nothing is copied; a later save of the step uses the image as well.

        Args:
            step: training step, which is the version of the weights.
            collect: the model, its state dict, or a function that returns that, which is called
                only if it has to be staged, or compared with an earlier upload of this step.
            role: role whose weights these are.

        Returns:
            The tag of the published version, or None if it could not be staged (`wait_all` raises
            why); and what staging cost the caller. Weights of the upload before are a warning.

        Raises:
            ConfigError: an argument is invalid; or a later step was uploaded before, or this one
                with other weights: readers would keep what they have; or the adapter is missing.
            RootInUseError, SupersededError: as in `save`.
            SpoolError, ImageError: as in `save`, for the first image of this process.
        """
        self._require_own_process()
        step, state = check_number("step", step), getattr(collect, "state_dict", collect)
        if not callable(state):
            check_type(f"step {step}: what is uploaded", state, Mapping, "model.state_dict()")
        self._run.require_not_superseded(step)
        origin = self._submitter.make_origin(step, role, "state_dict")
        self._metrics.flush()
        call = state if callable(state) else lambda: state
        published, staged = self._states.upload(origin, call)
        if published:
            self._uploads.start(published)
        return published, staged

    # ------------------------------------------------------------ outcomes

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every save that this process submitted is committed or has failed.

        Args:
            timeout: seconds from when an overlapped save is staged; None for no limit.

        Raises:
            SaveFailedError: saves were not committed, or readers refuse what was published
                (``on_nonfinite``); the message says which, why and where to look. Each failure is
                raised once.
            SaveTimeoutError: the time is over, or the coordinator was closed; the saves may still
                commit.
            ConfigError: this process is a forked child.
        """
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        self.wait_staged()
        deadline = None if timeout is None else time.monotonic() + timeout
        self._failures += self._states.take_failures()
        self._failures += self._functions.wait(deadline)  # kept, should the next lines time out
        self._failures += self._uploads.wait(deadline)
        failures = [*self._watcher.wait(deadline), *self._take_failures()]
        if failures:
            raise SaveFailedError("\n".join(failures))

    @property
    def commit_seconds(self) -> Mapping[str, float]:
        """Seconds from submission to commit of this process's committed saves, by request key.

        Ranks other than 0 learn of commits in `wait_all` and take the time from the manifest, so
        the clocks of two nodes decide.
        """
        return self._watcher.commit_seconds

    def close(self, timeout: float = CLOSE_S) -> None:
        """Release all resources. Saves already submitted continue without this process.

        Earlier handlers of the signals of `on_preemption` are restored.

        Args:
            timeout: seconds in which to wake the saver for what was just submitted. A saver or
                worker that starts later finds the images by itself.
        """
        if not self._is_own:
            return
        try:
            self._states.close()
        finally:
            self._metrics.close()
            self._watcher.close(timeout)
            self._run.close()
            self._preemption.restore_handlers()
        self.spool.remove_if_unused()

    def __enter__(self) -> "CheckpointCoordinator":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not self._is_own:
            return  # a child that was forked within the block
        # the exit code of `sys.exit(0)` says that all is well, as the end of the block does
        ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if ends_well and not (self.preempted and self._has_waited):
                self.wait_all()
        except KeyboardInterrupt as interrupt:
            error = interrupt
            raise
        finally:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted:
                self._watcher.warn_of_pending()
            self.close(0.0 if interrupted else CLOSE_S)

    # ------------------------------------------------------------ Trinity's calls

    def save_async(
        self, name: str, save_fn: Callable[[], Any], global_step: int, is_state_dict: bool = False
    ) -> None:
        """Run a save function in a background thread; the step's commit waits for it.

        It follows Trinity's method of this name. Saves of the same name run one after the other.
        Files below the step's folder that change during the call become part of the commit. Call
        `save` of the same step or `register_and_monitor` afterwards, which submit the save. A
        step that an earlier run has committed makes way before; if a resume, a reader or a pin
        needs it, or this run has committed it, ``save_fn`` is not called, and the save fails.

        Args:
            name: name of the save, unique within a step and rank.
            save_fn: called without arguments. Its error fails the step's save and is raised by
                `wait_all`; later saves are unaffected.
            global_step: training step.
            is_state_dict: True for the sync of the step, False for its checkpoint.
        """
        check_type(f"save function {name}", save_fn, Callable, "a function without arguments")
        status = self._status_of(name, global_step, is_state_dict)
        with self._states.defer_errors(status.step, status.kind, f"save function {name}"):
            self._functions.start(name, save_fn, status)
            self._states.has_saved = True

    def save_sync(
        self, save_fn: Callable[[], Any], global_step: int, is_state_dict: bool = False
    ) -> None:
        """Run a save function in the calling thread, for one that calls collectives.

        It follows Trinity's method of this name, and raises the function's error. After the first
        save of this process, what else fails is raised by `wait_all`, as of `save_async`.

        Args:
            save_fn, global_step, is_state_dict: as in `save_async`.
        """
        check_type("save_fn", save_fn, Callable, "a function without arguments")
        name = f"sync-{uuid.uuid4().hex[:8]}"
        status, error = self._status_of(name, global_step, is_state_dict), None
        with self._states.defer_errors(status.step, status.kind, f"save function {name}"):
            error = self._functions.call(save_fn, status)
        if error:
            raise error
        self._states.has_saved = True

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
    ) -> None:
        """Submit a step whose save functions were started; do not wait for them.

        It follows Trinity's method of this name. A step is saved once, however often this is
        called. Other coroutines run meanwhile.

        Args:
            global_step: training step.
            is_state_dict: True for the sync of the step, False for its checkpoint.
            state_dict_thread_count: least number of saves of model weights to expect.
            checkpoint_thread_count: least number of other saves to expect.

        Raises:
            ConfigError: the step or a count is not a whole number, or is negative. `wait_all`
                raises what fails later, also if the save has failed, and `save` was not called
                again for its states.
        """
        step, kind = check_number("step", global_step), _kind(is_state_dict)
        expected = check_number("state_dict_thread_count", state_dict_thread_count)
        expected += check_number("checkpoint_thread_count", checkpoint_thread_count)
        self._require_own_process()

        def submit() -> None:  # waits for a copy, and reads files of the spool and of the root
            with self._states.defer_errors(step, kind):
                self.wait_staged()
                if not self._states.fail_without_parts(step, kind):
                    self._submitter.submit_functions(step, kind, expected)
                    self._states.has_saved = True

        try:
            submitted = asyncio.get_running_loop().run_in_executor(None, submit)
        except RuntimeError:  # no thread can be started, or the program has ended but for threads
            submit()
        else:
            await submitted

    # ------------------------------------------------------------ preemption

    def on_preemption(self, signum: int = signal.SIGTERM, *, grace_s: float = 30.0) -> None:
        """Treat a signal as the notice that this process ends soon, instead of ending at it.

        The handler records the time; check `any_preempted` between two steps. A time limit, of
        ``TRINITY_SYNC_SAVE_BY`` or of the Slurm job (``SLURM_JOB_END_TIME``), needs no signal.
        Workers that a DataLoader starts afterwards outlive the signal, unless this process sends
        it; other forked children handle it as before. Once it has come, a child that is killed is
        logged, and PyTorch's handler of SIGCHLD raises nothing.

        Args:
            signum: signal of the scheduler: SIGTERM in Kubernetes, that of ``--signal`` in Slurm.
            grace_s: seconds from the signal until the process is killed, and those that an
                emergency save gets before a time limit.

        Raises:
            ConfigError: this is not the main thread, the signal cannot be caught, or this process
                is a forked child.
        """
        self._require_own_process()
        check_type("signum", signum, int, "signal.SIGTERM")
        self._preemption.notice(signum, check_seconds("grace_s", grace_s))

    @property
    def preempted(self) -> bool:
        """Whether this process ends soon, by the signal of `on_preemption` or by a time limit.

        Ranks learn of it at different times.
        """
        return self._preemption.noticed

    def any_preempted(self) -> bool:
        """Return whether `preempted` is True on any rank; a collective call, after each step.

        Before a time limit, it is True once the longest time between two calls and ``grace_s``
        would exceed what is left.
        """
        return noticed_by_any(self._preemption.check())

    def emergency_save(
        self,
        step: int,
        components: Mapping[str, Any],
        *,
        role: str = "actor",
        metadata: str | Path | None = None,
        deadline_s: float | None = None,
    ) -> EmergencySave:
        """Save a last step within a deadline: the weights first, then the other components.

        Every rank calls it at the same step. It raises no error: the result and the log say what
        was not done. The copy of a component is not interrupted, so the last one may end after the
        deadline; leave some seconds for it.

        Args:
            step, components, role, metadata: as in `save`.
            deadline_s: seconds for all of it; by default what is left of ``grace_s``.

        Returns:
            What was submitted, what is committed, and what was not done.
        """
        left = self._preemption.left_s
        with suppress(ConfigError):  # save raises it again
            step = check_number("step", step)
            left = left if deadline_s is None else check_seconds("deadline_s", deadline_s)
        self._has_waited = True
        self._stager.slots.wait_at_most(left / 4)

        def save(kind: Kind, states: Mapping[str, Any]) -> Sequence[str]:
            try:
                self.wait_staged()
            except Exception as error:  # an earlier step's, which must not fail this one
                self._failures.append(str(error))
            self._failures += self._states.take_failures()
            staged = self.save(step, states, role=role, kind=kind, metadata=metadata)
            if failures := self._states.take_failures():
                raise SaveFailedError("\n".join(failures))
            return staged.components or tuple(states)  # which an earlier call has submitted

        def wait(seconds: float) -> None:
            if due := self._states.list_due(step, role):
                others = ", ".join(due)
                raise SaveTimeoutError(
                    f"step {step} is committed once this process has saved {others} as well."
                )
            self.wait_all(seconds)

        kinds: tuple[Kind, ...] = ("state_dict", "checkpoint")
        if step == self._run.resumed_from:  # whose weights are committed
            kinds = ("checkpoint",)
        return run_emergency_save(
            step,
            components,
            left,
            kinds=kinds,
            save=save,
            wait=wait,
            failures=self._take_failures,
            committed=lambda: self._committed_kinds(step),
        )

    # ------------------------------------------------------------ private

    def _handle(self, origin: Origin, staged: Staged) -> SaveHandle:
        key = (self._states.find_serving(origin) if staged is NOTHING_STAGED else origin).key
        return SaveHandle(
            **vars(staged),
            wait_staged=self.wait_staged,
            wait_committed=lambda deadline: self._watcher.wait_for(key, deadline),
            has_committed=lambda: self._watcher.has_committed(key),
        )

    @property
    def _is_own(self) -> bool:
        """Whether this process created the coordinator and is not a forked child."""
        return self._process == os.getpid()

    def _require_own_process(self) -> None:
        if self._process != os.getpid():
            raise ConfigError(
                f"rank {self.rank} of {self.root}: process {self._process} created this "
                f"coordinator, and this is process {os.getpid()}, a forked child without its "
                "slots, threads and saves. Call it in the parent process, or create a coordinator "
                "with another root here."
            )

    def _status_of(self, name: str, step: int, is_state_dict: bool) -> FunctionStatus:
        self._require_own_process()
        step, name = check_number("step", step), check_name("name of a save", name)
        self._run.require_not_superseded(step)
        run = self._run.get()
        self._metrics.flush()
        return FunctionStatus(
            name=name,
            run=run.number,
            run_key=run.key,
            step=step,
            kind=_kind(is_state_dict),
            rank=self.rank,
            process=self._functions.process,
        )

    def _take_failures(self) -> list[str]:
        failures, self._failures = self._failures, []
        return failures

    def _committed_kinds(self, step: int) -> tuple[Kind, ...]:
        with suppress(Exception):  # the root cannot be read
            manifest = read_run_head(self.root, self._run.number, step)
            return tuple(kind for kind in KINDS if manifest and manifest.has_kind(kind))
        return ()


def _kind(is_state_dict: bool) -> Kind:
    return "state_dict" if is_state_dict else "checkpoint"


def _end_watcher(watcher: CommitWatcher, process: int) -> None:
    """End the thread of a coordinator that was dropped without `close`, as a notebook's cell does.

    Not in a forked child, which has the locks of its parent's threads.
    """
    if os.getpid() == process:
        watcher.end_at_most(10.0)
