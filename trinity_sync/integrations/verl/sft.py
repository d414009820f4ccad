"""Wrappers for the functions with which veRL's SFT trainer saves and resumes.

Each of its ranks has a handler, which writes the dataloader's position after the engine's save, and
on rank 0 the latest pointer after that. As in `driver`, the position is written first here, into a
folder of the save's own, and the commit moves it to the step and updates the pointer.

`switch` installs the wrappers while veRL's modules are imported. The trainer itself is not
imported, since ``-m verl.trainer.sft_trainer`` runs it as the program. So the wrapper that waits
for commits is on the function with which it destroys the process group.
"""

import logging
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.adapter import attaching_folder, broadcast_from_rank_0, step_folder
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.import_hooks import Call, wrapper
from trinity_sync.integrations.verl.driver import LOGGED, get_manager

logger = logging.getLogger(__name__)

_saving: list[Any] = []
"""Managers of this process that have submitted a step."""


@wrapper
def wrap_save_checkpoint(original: Call, handler: Any, step: int) -> None:
    """Wrap a handler's ``save_checkpoint``: dataloader position first, the engine's save last."""
    if not _uses_trinity_sync(handler):
        return original(handler, step)
    manager = get_manager(handler.engine)
    if manager not in _saving:
        _saving.append(manager)
        if handler.default_hdfs_dir and handler.rank == 0:
            logger.warning(
                "nothing is copied to trainer.default_hdfs_dir=%s, since steps are committed "
                "later; to copy committed steps, set the job's remote: trinity-sync jobs set",
                handler.default_hdfs_dir,
            )
    attaching = attaching_folder(Path(handler.default_local_dir).resolve())
    name = broadcast_from_rank_0(attaching, lambda: uuid.uuid4().hex)
    folder = step_folder(attaching / name, step)
    # at the end of an epoch none: resumed from there, veRL would skip the next one
    if handler.is_mp_src_rank_with_outputs and step % len(handler.train_dataloader):
        folder.mkdir(parents=True, exist_ok=True)
        position = folder / f"data_{handler.dp_rank}.pt"
        torch.save(handler.train_dataloader.state_dict(), position)
    dist.barrier()  # rank 0 attaches the files of all ranks
    handler.engine.save_checkpoint(
        local_path=str(folder), global_step=step, max_ckpt_to_keep=handler.max_ckpt_to_keep
    )
    if handler.rank == 0:
        LOGGED.note_saved(step, manager.record_metrics)


@wrapper
def wrap_determine_resume_path(original: Call, handler: Any) -> str | None:
    """Wrap a handler's ``_determine_resume_path``: rank 0 searches for the newest step, for all.

    It searches even if there is no folder yet, since steps may be in a remote.
    """
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if not _uses_trinity_sync(handler):
        return original(handler)
    root = Path(handler.default_local_dir).resolve()
    get_manager(handler.engine).set_root(root)
    if handler.resume_mode != "auto" or handler.resume_from_path is not None:
        return original(handler)
    return broadcast_from_rank_0(root, lambda: find_latest_ckpt_path(str(root)))


@wrapper
def wrap_destroy_global_process_group(original: Call) -> None:
    """Wrap veRL's ``destroy_global_process_group``: wait for all commits first.

    The wrapped function raises `SaveFailedError` if a save failed.
    """
    while _saving:
        _saving.pop().wait_on_save_thread()
    original()


def _uses_trinity_sync(handler: Any) -> bool:
    """Return whether a handler's engine saves through trinity_sync.

    Raises:
        ConfigError: the handler is that of ``verl.trainer.sft_trainer_ray``.
    """
    from trinity_sync.integrations.verl.manager import CommitsDriverFiles

    if handler.mode.name == "RAY":
        raise ConfigError(
            f"the steps in {handler.default_local_dir} cannot be saved or found: "
            "verl.trainer.sft_trainer_ray does not work with trinity_sync; train with torchrun -m "
            "verl.trainer.sft_trainer, or unset VERL_USE_EXTERNAL_MODULES"
        )
    return isinstance(get_manager(handler.engine), CommitsDriverFiles)
