"""A job's settings from a Trinity config, and the configs that are not supported."""

import json
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_sync import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.import_hooks import Call, wrapper
from trinity_sync.integrations.verl.driver import read_forwarded_variables
from trinity_sync.layout import WriteConcurrency
from trinity_sync.settings import Settings

POSITION = "trainer_meta.json"
"""Name under which the trainer's position in its data is committed with a step."""


SAVE_STRATEGIES: dict[str, WriteConcurrency] = {
    "unrestricted": "all",
    "single_process": "per_rank",
    "single_node": "per_node",
    "single_thread": "one",
}
"""``write_concurrency`` for Trinity's ``trainer.save_strategy``."""


@dataclass(frozen=True)
class Job:
    """Settings that the trainer sends to its workers."""

    root: str
    """``checkpoint_job_dir``, as an absolute path."""
    run_key: str
    roles: tuple[str, ...]
    write_concurrency: WriteConcurrency
    """``trainer.save_strategy``."""
    keep: int
    """``trainer.max_checkpoints_to_keep``; 0 keeps all."""
    position: str
    """Path of the file with the trainer's position in its data."""

    @classmethod
    def from_config(cls, config: Any, *, critic: bool) -> "Job":
        """Return the job of a new run, which may train a critic, by Trinity's validated config.

        Raises:
            ConfigError: the config is not supported.
        """
        require_supported(config)
        root, trainer = Path(config.checkpoint_job_dir).resolve(), config.trainer
        return cls(
            root=str(root),
            run_key=Settings().run_key or uuid.uuid4().hex,
            roles=("actor", "critic") if critic else ("actor",),
            write_concurrency=SAVE_STRATEGIES[trainer.save_strategy.value],
            keep=max(0, trainer.max_checkpoints_to_keep or 0),
            position=str(root / f"{trainer.name}_meta.json"),
        )

    def make_coordinator(self) -> CheckpointCoordinator:
        """Make this rank's coordinator; collective on the default process group."""
        return CheckpointCoordinator.of_process_group(
            self.root,
            run_key=self.run_key,
            roles=self.roles,
            job={"write_concurrency": self.write_concurrency},
        )


def require_supported(config: Any) -> None:
    """Require that trinity_sync supports a Trinity config.

    Raises:
        ConfigError: it does not; the message names all unsupported settings.
    """
    trainer, rollout = config.trainer, config.explorer.rollout_model
    from_disk = config.synchronizer.sync_method.value == "checkpoint"
    asked = {
        f"trainer.trainer_type: {trainer.trainer_type}": trainer.trainer_type != "verl",
        f"trainer.trainer_strategy: {trainer.trainer_strategy}": not str(
            trainer.trainer_strategy
        ).startswith("fsdp"),
        "model.lora_configs": bool(config.model.lora_configs),
        "explorer.rollout_model.engine_type: sglang with synchronizer.sync_method: checkpoint": (
            rollout.engine_type == "sglang" and from_disk
        ),
    }
    if unsupported := [name for name, wanted in asked.items() if wanted]:
        raise ConfigError(
            f"{config.checkpoint_job_dir}: trinity_sync does not save with "
            f"{', '.join(unsupported)}; change that, or unset TRINITY_PLUGIN_DIRS to "
            "save with Trinity itself"
        )


@wrapper
def wrap_get_envs(original: Call, config: Any) -> dict[str, str]:
    """Wrap Trinity's ``get_envs``: add the environment variables of trinity_sync."""
    return original(config) | read_forwarded_variables()


@wrapper
async def wrap_pull_latest_weights(original: Call, explorer: Any) -> None:
    """Wrap Trinity's ``Explorer._pull_latest_weights``: go back from what a resume superseded."""
    if 0 < await explorer.synchronizer.get_latest_model_version.remote() < explorer.model_version:
        explorer.model_version = -1
    await original(explorer)


_newest: list[weakref.ref[Any]] = []
"""The newest sample strategy of this process, which is the trainer's."""


@wrapper
def wrap_sample_strategy_init(original: Call, strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap Trinity's ``SampleStrategy.__init__``: record the trainer's for `read_position`.

    The trainer is a Ray actor, whose methods cannot be changed once plugins are loaded.
    """
    _newest[:] = [weakref.ref(strategy)]
    original(strategy, *args, **kwargs)


def read_position(step: int) -> bytes | None:
    """Return the trainer's position in its data, as Trinity saves it; None if it is unknown."""
    strategy = _newest[0]() if _newest else None
    if strategy is None:
        return None
    state = {"latest_iteration": step, "sample_strategy_state": strategy.state_dict()}
    return json.dumps(state, indent=2).encode()
