"""What veRL's drivers do around a checkpoint, with ours in its place.

veRL's driver has the workers save, then writes ``data.pt`` (the dataloader's position) and the
iteration file by itself. With a save that is committed later, that order is wrong in both: a killed
driver would leave a committed step without its data, or an iteration file that names a step which
nobody has committed. So the driver's own files come first here, the hand-over last, and the
iteration file is left to the commit (veRL's ``async_save``).

`switch` puts these into veRL while the modules concerned are imported, so this module imports
nothing of veRL by itself. `manager` has the workers' manager.
"""

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.layout import refuse_url, step_folder
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import is_foreign
from trinity_sync.storage.latest_pointer import read_latest_pointer

SETTLE_S = 60.0
"""Seconds for which a resume waits for what the run before handed over on its node."""

WAIT = "async_calls_finalize_fn_exec"
"""veRL's name for what its trainers call before each step, and blocking after the last one."""

ASYNC_SAVE = "actor_rollout_ref.actor.checkpoint.async_save"


def wrap_find_latest_ckpt_path(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Wrap veRL's ``find_latest_ckpt_path``: wait for saves in flight, go by commits."""

    @functools.wraps(original)
    def find_latest_ckpt_path(
        path: str | None, directory_format: str = "global_step_{}"
    ) -> str | None:
        if path is None or directory_format != "global_step_{}":
            return original(path, directory_format)
        refuse_url(path)
        if not Path(path).is_dir() and not Settings().remote_required:
            return original(path, directory_format)
        with closing(CheckpointCoordinator(path)) as saves:
            newest = saves.latest(settle_s=SETTLE_S)
        if newest is None or _was_saved_by_verl(
            Path(path), read_latest_pointer(path, "checkpoint")
        ):
            return original(path, directory_format)
        return str(newest)

    return find_latest_ckpt_path


def _was_saved_by_verl(root: Path, step: int | None) -> bool:
    """Whether the iteration file names a step of a run without us; it never runs ahead of ours."""
    return step is not None and is_foreign(step_folder(root, step))


def wrap_save_checkpoint(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a trainer's ``_save_checkpoint``: its own files first, then workers, then callbacks.

    Where veRL saves because its time on the machine ends soon (ESI), it waits for the commit.
    """

    @functools.wraps(original)
    def _save_checkpoint(trainer: Any) -> None:
        if not _is_fsdp(trainer.config.actor_rollout_ref.actor):
            return original(trainer)
        OmegaConf.update(trainer.config, ASYNC_SAVE, True, force_add=True)
        groups = [trainer.actor_rollout_wg, *([trainer.critic_wg] if trainer.use_critic else [])]
        put_off: list[Callable[[], Any]] = []
        with ExitStack() as meanwhile:
            for group in groups:
                meanwhile.enter_context(_put_off(group, "save_checkpoint", put_off))
            if callback := getattr(trainer, "checkpoint_callback", None):
                meanwhile.enter_context(_put_off(callback, "on_save", put_off))
            original(trainer)
        for call in put_off:
            call()
        if _expires_soon(trainer):
            getattr(trainer.actor_rollout_wg, WAIT)(blocking=True)

    return _save_checkpoint


def wrap_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a trainer's ``fit``: return once all saves are committed, or raise `SaveFailedError`."""

    @functools.wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, *args, **kwargs)
        getattr(trainer.actor_rollout_wg, WAIT)(blocking=True)
        return result

    return fit


def add_wait_method(worker: type) -> None:
    """Add the method by which the trainer waits for saves to a worker class that lacks it."""
    from verl.single_controller.base.decorator import Dispatch, register

    if hasattr(worker, WAIT):
        return

    def wait(self: Any, blocking: bool = False) -> None:
        """Wait for all saves of this worker's engine; raises `SaveFailedError`."""
        engine = getattr(self, "actor", self)
        manager = getattr(getattr(engine, "engine", None), "checkpoint_manager", None)
        ours = getattr(manager, "wait_on_save_thread", None)
        if blocking and ours:
            ours()

    wait.__name__ = WAIT
    setattr(worker, WAIT, register(dispatch_mode=Dispatch.ONE_TO_ALL)(wait))


def wrap_get_ppo_ray_runtime_env(
    original: Callable[..., dict[str, Any]], switch: str
) -> Callable[..., Any]:
    """Wrap veRL's ``get_ppo_ray_runtime_env``: add the variables that our processes need.

    These are a key of the run, new at each launch and common to actor and critic; the roles of a
    checkpoint; settings that are no secrets; and the switch itself.

    Args:
        original: veRL's function.
        switch: name of the module that is the switch.
    """

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
        environment = original(config)
        variables = environment.setdefault("env_vars", {})
        ours = read_forwarded_variables()
        ours.setdefault("TRINITY_SYNC_RUN", uuid.uuid4().hex)
        if config is not None and "TRINITY_SYNC_ROLES" not in ours and _has_critic(config):
            ours["TRINITY_SYNC_ROLES"] = '["actor","critic"]'
        given = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
        modules = [name for name in given if name and name != switch]
        ours["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, switch])
        variables.update(ours)
        return environment

    return get_ppo_ray_runtime_env


NOT_FORWARDED = ("TRINITY_SYNC_CATALOG_URL", "TRINITY_SYNC_NODE")
"""The first may hold a password; the second is this node's own name."""


def read_forwarded_variables() -> dict[str, str]:
    """Return the variables of this process that processes on other nodes get."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "PREFECT_API_URL"
        or (name.startswith("TRINITY_SYNC_") and name not in NOT_FORWARDED)
    }


def _has_critic(config: Any) -> bool:
    from verl.trainer.ppo.utils import need_critic

    return "critic" in config and need_critic(config) and _is_fsdp(config.critic)


def _is_fsdp(config: Any) -> bool:
    return str(config.strategy) in ("fsdp", "fsdp2")


def _expires_soon(trainer: Any) -> bool:
    from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

    longest = getattr(trainer, "max_steps_duration", None)
    if longest is None:  # this trainer does not look at the end of its time
        return False
    spare = trainer.config.trainer.esi_redundant_time
    return bool(should_save_ckpt_esi(max_steps_duration=longest, redundant_time=spare))


@contextmanager
def _put_off(owner: Any, name: str, calls: list[Callable[[], Any]]) -> Iterator[None]:
    """Note calls of a method meanwhile, in place of making them."""
    method, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, lambda *args, **kwargs: calls.append(lambda: method(*args, **kwargs)))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
