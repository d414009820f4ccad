"""Wrappers for the functions with which veRL's drivers save and resume.

veRL's driver makes the workers save, then writes ``data.pt`` (the dataloader's position) and the
latest pointer itself. With a save that is committed later, that order is wrong twice: a killed
driver would leave a committed step without its data, or a pointer to a step that is not committed.
So the driver's own files are written first here, into a folder of the save's own, the save is
submitted last, and its commit moves them to the step and updates the pointer (veRL's
``async_save``).

`switch` installs the wrappers while veRL's modules are imported, so this module imports nothing of
veRL itself. `manager` has the workers' checkpoint manager.
"""

import functools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trinity_sync import CheckpointCoordinator
from trinity_sync.adapter import attaching_folder, refuse_url, step_folder
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.import_hooks import Call, replace_attributes, wrapper
from trinity_sync.integrations.trainer_saves import select_metrics
from trinity_sync.settings import CONFIG, STACK_PREFIX
from trinity_sync.storage.discovery import is_foreign, read_latest_pointer
from trinity_sync.storage.metrics import MetricsLog, find_run_of_step
from trinity_sync.storage.runs import find_newest_run

logger = logging.getLogger(__name__)

SWITCH = "trinity_sync.integrations.verl.switch"
ROOT = "TRINITY_SYNC_ROOT"
"""Variable with the job's root, for the back end of the weight transfer."""

WAIT = "async_calls_finalize_fn_exec"
"""Method that veRL's trainers call before each step, and with ``blocking`` after the last one."""
CALL = "call_checkpoint_manager"


@wrapper
def wrap_load_checkpoint(original: Call, trainer: Any) -> Any:
    """Wrap a trainer's ``_load_checkpoint``: its workers know the job before they load a step."""
    root = Path(trainer.config.trainer.default_local_dir).resolve()
    for group in _list_groups(trainer).values():
        getattr(group, CALL)("set_root", root)
    return original(trainer)


@wrapper
def wrap_find_latest_ckpt_path(
    original: Call, path: str | None, directory_format: str = "global_step_{}"
) -> str | None:
    """Wrap veRL's ``find_latest_ckpt_path``: wait for saves in flight, return committed steps."""
    if path is None or directory_format != "global_step_{}":
        return original(path, directory_format)
    refuse_url(path)
    if not Path(path).is_dir():
        return original(path, directory_format)
    with closing(CheckpointCoordinator(path)) as saves:
        newest = saves.latest_step()
    named = read_latest_pointer(path, "checkpoint")
    saved_by_verl = named is not None and is_foreign(step_folder(path, named))
    if newest is None or saved_by_verl:
        return original(path, directory_format)
    return str(step_folder(path, newest))


@wrapper
def wrap_save_checkpoint(original: Call, trainer: Any) -> None:
    """Wrap a trainer's ``_save_checkpoint``: its own files first, then workers, then callbacks.

    The workers' path names the folder of those files, in `attaching_folder`, and rank 0 attaches
    it. A critic whose engine veRL saves itself writes its files there, too.

    If veRL saves because its instance expires soon (ESI), the wrapper waits for the commit.
    """
    if not _saves_here(trainer.config.actor_rollout_ref.actor):
        return original(trainer)
    async_save = "actor_rollout_ref.actor.checkpoint.async_save"
    OmegaConf.update(trainer.config, async_save, True, force_add=True)
    deferred: list[Callable[[], Any]] = []
    config, roles = trainer.config.trainer, ["actor", *["critic"] * trainer.use_critic]
    counts = [config.get(f"max_{role}_ckpt_to_keep") or 0 for role in roles]
    removes = min(counts) > 0 or config.get("remove_previous_ckpt_in_save")
    keep = {} if removes else {"max_ckpt_to_keep": None}  # a step is removed with both roles
    with ExitStack() as meanwhile:
        for group in _list_groups(trainer).values():
            meanwhile.enter_context(_defer_calls(group, "save_checkpoint", deferred, keep))
        if callback := getattr(trainer, "checkpoint_callback", None):
            folder = step_folder(config.default_local_dir, trainer.global_steps)
            own = {"checkpoint_dir": str(folder)}
            meanwhile.enter_context(_defer_calls(callback, "on_save", deferred, own))
        meanwhile.enter_context(_redirect_files(config))
        original(trainer)
    for call in deferred:
        call()
    root = Path(config.default_local_dir).resolve()
    LOGGED.note_saved(trainer.global_steps, open_metrics(root).record)
    if _expires_soon(trainer):
        getattr(trainer.actor_rollout_wg, WAIT)(blocking=True)


class LoggedMetrics:
    """Records what a trainer of this process logs of the steps that it saves.

    One trainer logs a step before it saves it, and another afterwards.
    """

    def __init__(self) -> None:
        self._logged: tuple[int, dict[str, float]] = (-1, {})
        self._saved: tuple[int, Call] = (-1, lambda *_: None)

    def note_logged(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics that were logged, if their step was saved; otherwise keep them."""
        known = self._logged[1] if self._logged[0] == step else {}
        self._logged = step, known | select_metrics(metrics)
        self._record()

    def note_saved(self, step: int, record: Call) -> None:
        """Record what was and will be logged of a step by a call of ``record`` with both."""
        self._saved = step, record
        self._record()

    def _record(self) -> None:
        (step, metrics), (saved, record) = self._logged, self._saved
        if step == saved and metrics:
            record(step, metrics)


LOGGED = LoggedMetrics()
"""Of the trainer of this process."""


@wrapper
def wrap_log(
    original: Call, tracking: Any, data: Mapping[str, Any], step: int, *args: Any, **named: Any
) -> None:
    """Wrap ``log`` of veRL's ``Tracking``: metrics of saved steps count in retention policies."""
    original(tracking, data, step, *args, **named)
    LOGGED.note_logged(step, data)


@functools.lru_cache(maxsize=1)
def open_metrics(root: Path) -> MetricsLog:
    """Return what records metrics of the run of this process's trainer, in one thread.

    Those of a step that the run began with, or one before it, are of the run that committed it.
    """

    def find_run(step: int) -> int:
        newest = find_newest_run(root)
        if newest and step <= newest.resumed_from:
            return find_run_of_step(root, step)
        return newest.number if newest else 1

    return MetricsLog(root, find_run)


@wrapper
def wrap_fit(original: Call, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a trainer's ``fit``: return once all saves are committed, or raise `SaveFailedError`.

    The memory of the first save is touched beside the first steps.
    """
    if trainer.config.trainer.save_freq > 0:
        root = Path(trainer.config.trainer.default_local_dir).resolve()
        for role, group in _list_groups(trainer).items():
            getattr(group, CALL)("prewarm", root, role)
    result = original(trainer, *args, **kwargs)
    getattr(trainer.actor_rollout_wg, WAIT)(blocking=True)
    return result


def add_methods(worker: type) -> None:
    """Add the methods that the trainers of `wrap_fit` call to a worker class."""
    from verl.single_controller.base.decorator import Dispatch, register

    def call(self: Any, name: str, *arguments: Any) -> None:
        """Call a method of this worker's checkpoint manager, if it has one of that name."""
        engine = getattr(getattr(self, "actor", self), "engine", None)
        if ours := getattr(get_manager(engine), name, None):
            ours(*arguments)

    def wait(self: Any, blocking: bool = False) -> None:
        """Wait for all saves of this worker's engine; raises `SaveFailedError`."""
        if blocking:
            call(self, "wait_on_save_thread")

    for name, method in ((WAIT, wait), (CALL, call)):
        method.__name__ = name
        setattr(worker, name, register(dispatch_mode=Dispatch.ONE_TO_ALL)(method))


@wrapper
def wrap_get_ppo_ray_runtime_env(original: Call, config: Any = None) -> dict[str, Any]:
    """Wrap veRL's ``get_ppo_ray_runtime_env``: add the environment variables of trinity_sync.

    These are the key of the run, which is new at each launch and the same for actor and critic; the
    roles of a checkpoint; the root, for the back end of the weight transfer; settings that are not
    secret; and the switch itself.
    """
    environment = original(config)
    variables = environment.setdefault("env_vars", {})
    ours = read_forwarded_variables()
    ours.setdefault("TRINITY_SYNC_RUN_KEY", uuid.uuid4().hex)
    if config is not None:
        root = config.trainer.default_local_dir
        refuse_url(root)
        named, folder = ours.get(ROOT), Path(root).resolve()
        if named and Path(named).resolve() != folder:
            raise ConfigError(
                f"{ROOT} is {named}, and trainer.default_local_dir is {root}: the weights of "
                f"this training would be published into another job. Unset {ROOT}, or set both "
                "to one folder"
            )
        ours[ROOT] = str(folder)  # workers have other folders
        if "TRINITY_SYNC_ROLES" not in ours and _has_critic(config):
            ours["TRINITY_SYNC_ROLES"] = "actor,critic"
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES") or SWITCH
    has_switch = SWITCH in modules.split(",")
    ours["VERL_USE_EXTERNAL_MODULES"] = modules if has_switch else f"{modules},{SWITCH}"
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    # Ray refuses a variable that `ray job submit` has set as well
    variables.update(ours.items() - (job.get("env_vars") or {}).items())
    return environment


NOT_FORWARDED = ("TRINITY_SYNC_NODE", CONFIG, STACK_PREFIX)
"""Prefixes of the name of this node and of the stack's settings, which may contain a password."""


def read_forwarded_variables() -> dict[str, str]:
    """Return the environment variables that processes on other nodes need."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "PREFECT_API_URL"
        or (name.startswith("TRINITY_SYNC_") and not name.startswith(NOT_FORWARDED))
    }


def _has_critic(config: Any) -> bool:
    from verl.trainer.ppo.utils import need_critic

    return "critic" in config and need_critic(config) and _saves_here(config.critic)


def _saves_here(config: Any) -> bool:
    """Return whether the switch replaces the manager of a worker's engine."""
    return str(config.strategy) in ("fsdp", "fsdp2", "veomni", "megatron")


def _list_groups(trainer: Any) -> dict[str, Any]:
    """Return the worker groups whose engines are saved here, by role."""
    groups = {}
    if _saves_here(trainer.config.actor_rollout_ref.actor):
        groups["actor"] = trainer.actor_rollout_wg
    if trainer.use_critic and _saves_here(trainer.config.critic):
        groups["critic"] = trainer.critic_wg
    return groups


def get_manager(engine: Any) -> Any:
    """Return the checkpoint manager of an engine of veRL; None if it has none."""
    megatrons = getattr(engine, "checkpoint_mananager", None)  # sic
    return getattr(engine, "checkpoint_manager", megatrons)


def _expires_soon(trainer: Any) -> bool:
    from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

    longest = getattr(trainer, "max_steps_duration", None)
    if longest is None:  # this trainer has no expiration
        return False
    spare = trainer.config.trainer.esi_redundant_time
    return bool(should_save_ckpt_esi(max_steps_duration=longest, redundant_time=spare))


@contextmanager
def _redirect_files(config: Any) -> Iterator[None]:
    """Name a new folder in `attaching_folder` as the trainer's within the block."""
    root = config.default_local_dir
    refuse_url(root)
    config.default_local_dir = str(attaching_folder(Path(root).resolve()) / uuid.uuid4().hex)
    try:
        yield
    finally:
        config.default_local_dir = root


def _defer_calls(
    owner: Any, name: str, calls: list[Callable[[], Any]], changed: dict[str, Any] | None = None
) -> AbstractContextManager[None]:
    """Collect the calls of a method within the block, with changed arguments, and make none."""
    method = getattr(owner, name)

    def defer(*args: Any, **kwargs: Any) -> None:
        calls.append(lambda: method(*args, **kwargs | (changed or {})))

    return replace_attributes(owner, **{name: defer})
