"""Functions on a veRL FSDP engine, with the signatures of those in Trinity's workers.

veRL's own ``fsdp_version`` tells FSDP1 from FSDP2, since engines do not.
"""

import logging
from collections.abc import Callable
from typing import Any

from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from trinity_sync import SaveHandle, Staged
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.fsdp.manager import FSDPCheckpointManager, list_sizes
from trinity_sync.integrations.verl.fsdp.state_dict import (
    collect_metadata,
    get_model_state_to_stage,
)
from trinity_sync.integrations.verl.manager import split_step_path


def use_trinity_sync(
    engine: Any, coordinator: CheckpointCoordinator, *, role: str = "actor"
) -> FSDPCheckpointManager:
    """Make an initialized engine save and load through ``coordinator``.

    Args:
        engine: veRL's FSDPEngine; its ``checkpoint_manager`` is replaced.
        coordinator: the job's coordinator on this rank.
        role: role of the engine's saves, whose memory is touched beside the first steps.

    Returns:
        The engine's new checkpoint manager.

    Raises:
        SpoolFullError: the images do not fit into shared memory; the message says how many bytes
            they need.
    """
    manager = FSDPCheckpointManager(
        engine.module,
        engine.optimizer,
        engine.lr_scheduler,
        engine.model_config.get_processor(),
        engine.checkpoint_config,
        trust_remote_code=engine.model_config.trust_remote_code,
        coordinator=coordinator,
    )
    coordinator.prewarm(list_sizes(manager), role=role)
    engine.checkpoint_manager = manager
    return manager


def fsdp_save_state_dict(
    engine: Any,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> SaveHandle | None:
    """Submit the weights of an engine for a sync through commits; every rank calls it.

    The weights are staged when it returns, so training can continue; explorers find them in
    ``latest_state_dict_iteration.txt`` once they are committed. An engine that saves through
    trinity_sync with ``save_lora_only`` submits the adapter weights alone.

    Args:
        engine: veRL's FSDPEngine.
        local_path: ``<root>/global_step_<N>/<role>``; None does nothing.
        global_step: training step, the N of the path, which is the version of the weights.
        coordinator: the job's coordinator on this rank.
        logger: logs what was staged.

    Returns:
        What was staged: nothing if the step's weights were submitted before. None without a path.

    Raises:
        ConfigError: path and step disagree.
        SpoolFullError: the first save does not fit into the spool. A later save that cannot be
            submitted does not stop training: nothing is staged, and the coordinator's `wait_all`
            raises the error.
    """
    if local_path is None:
        return None
    _, role = split_step_path(local_path, global_step)
    manager: Any = getattr(engine, "checkpoint_manager", None)

    def collect() -> dict[str, Any]:
        ours = isinstance(manager, FSDPCheckpointManager)
        return manager.get_model_state() if ours else get_model_state_to_stage(engine.module)

    states = {"model": _on_device(engine, collect)}
    metadata = collect_metadata(engine.module, getattr(manager, "processing_class", None))
    staged = coordinator.save(global_step, states, role=role, kind="state_dict", metadata=metadata)
    if staged.components:
        _log_staged(logger, global_step, "submitted", staged)
    return staged


def fsdp_upload_state_dict(
    engine: Any, synchronizer: Any, global_step: int, logger: logging.Logger
) -> Staged | None:
    """Publish the weights of an engine in shared memory; every rank calls it.

    Unlike in Trinity, nothing is gathered on rank 0 or sent through the Synchronizer, and no call
    is waited for. A save and an upload of the same step share one image.

    Args:
        engine: veRL's FSDPEngine, prepared with `use_trinity_sync`.
        synchronizer: the job's Synchronizer, a Ray actor; None stands for that of the job's root,
            if this process is in a Ray cluster. Without one, readers of this node find the version
            by its version tag in the spool.
        global_step: training step, which is the version of the weights. 0 does nothing, as in
            Trinity: explorers start with it.
        logger: logs what was staged.

    Returns:
        What was staged, and the seconds that it took; None if nothing can be published.

    Raises:
        ConfigError: the engine saves without trinity_sync.
        SpoolFullError: the first image does not fit into the spool.
    """
    manager = getattr(engine, "checkpoint_manager", None)
    if not isinstance(manager, FSDPCheckpointManager):
        raise ConfigError(
            f"step {global_step} cannot be uploaded: this engine saves without trinity_sync; call "
            "use_trinity_sync(engine, coordinator) first"
        )
    staged = manager.upload_state_dict(
        global_step,
        synchronizer=synchronizer,
        collect=lambda: _on_device(engine, manager.get_model_state),
    )
    if staged:
        _log_staged(logger, global_step, "uploaded", staged)
    return staged


def _log_staged(logger: logging.Logger, step: int, done: str, staged: Staged) -> None:
    nbytes, stall_ms = f"{staged.nbytes:,}", 1e3 * staged.stall_s
    logger.info("weights of step %d %s: %s bytes staged in %.1f ms", step, done, nbytes, stall_ms)


def _on_device(engine: Any, collect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``collect`` with offloaded parameters on the device, if the model is FSDP1.

    FSDP1 gathers its flat parameters on the device; FSDP2 returns shards where they are.
    """
    needed = fsdp_version(engine.module) == 1 and engine.is_param_offload_enabled
    if needed:
        load_fsdp_model_to_gpu(engine.module)
    try:
        return collect()
    finally:
        if needed:
            offload_fsdp_model_to_cpu(engine.module)
