"""The switch for veRL's own PPO, GRPO and SFT trainers: one environment variable, no fork.

::

    export VERL_USE_EXTERNAL_MODULES=trinity_sync.integrations.verl.switch

veRL imports the modules that the variable names in each of its processes, before its own, and
importing this module is the switch. A few names of veRL's modules are replaced (`PATCHES`), each
right after veRL has imported the module; this module itself imports nothing heavy. The replacements
are in `driver`, `sft`, `manager` and `megatron`.
"""

from importlib.metadata import version
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.integrations.import_hooks import Patch, patch_after_import, wrap

with from_extra("verl"):
    from packaging.version import Version

    VERL = Version(version("verl"))


def _save(name: str, manager: str) -> Patch:
    def patch(module: ModuleType) -> None:  # importing the manager imports this module of veRL
        setattr(module, name, lambda *given, **named: resolve_name(manager)(*given, **named))

    return patch


def _turbo(module: ModuleType) -> None:
    def refuse(engine: Any) -> None:
        raise ConfigError(
            "fsdp_turbo is not saved by trinity_sync: veRL's trainer would name a step before its "
            "commit; train with strategy fsdp2, or unset VERL_USE_EXTERNAL_MODULES"
        )

    module.FSDPTurboEngineWithLMHead._init_device_mesh = refuse


def _fully_async(module: ModuleType) -> None:
    raise ConfigError(
        "verl.experimental.fully_async_policy does not work with trinity_sync: its trainer would "
        "name a step before its commit; train with verl.trainer.main_ppo and "
        "trainer.v1.trainer_mode=separate_async, or unset VERL_USE_EXTERNAL_MODULES"
    )


def _workers(module: ModuleType) -> None:
    from trinity_sync.integrations.verl.driver import add_methods

    add_methods(module.TrainingWorker)
    add_methods(module.ActorRolloutRefWorker)


DRIVER, SFT = "trinity_sync.integrations.verl.driver", "trinity_sync.integrations.verl.sft"
FSDP = "trinity_sync.integrations.verl.fsdp.manager:TrainerCheckpointManager"
MEGATRON = "trinity_sync.integrations.verl.megatron:TrainerMegatronManager"

PATCHES: dict[str, Patch] = {
    "verl.utils.checkpoint.checkpoint_manager": wrap(
        {"find_latest_ckpt_path": f"{DRIVER}:wrap_find_latest_ckpt_path"}, within=["verl"]
    ),
    "verl.utils.checkpoint.checkpoint_handler": wrap(
        {
            "CheckpointHandler.save_checkpoint": f"{SFT}:wrap_save_checkpoint",
            "CheckpointHandler._determine_resume_path": f"{SFT}:wrap_determine_resume_path",
        }
    ),
    "verl.utils.distributed": wrap(
        {"destroy_global_process_group": f"{SFT}:wrap_destroy_global_process_group"},
        within=["verl"],
    ),
    "verl.utils.tracking": wrap({"Tracking.log": f"{DRIVER}:wrap_log"}),
    "verl.workers.engine.fsdp.transformer_impl": _save("FSDPCheckpointManager", FSDP),
    "verl.workers.engine.fsdp.fsdp_turbo_impl": _turbo,
    "verl.workers.engine.megatron.transformer_impl": _save("MegatronCheckpointManager", MEGATRON),
    "verl.workers.engine.veomni.transformer_impl": _save("FSDPCheckpointManager", FSDP),
    "verl.experimental.fully_async_policy": _fully_async,
    "verl.trainer.constants_ppo": wrap(
        {"get_ppo_ray_runtime_env": f"{DRIVER}:wrap_get_ppo_ray_runtime_env"}, within=["verl"]
    ),
    "verl.workers.engine_workers": _workers,
    # its fit waits for saves by itself
    "verl.trainer.ppo.ray_trainer": wrap(
        {
            "RayPPOTrainer._save_checkpoint": f"{DRIVER}:wrap_save_checkpoint",
            "RayPPOTrainer._load_checkpoint": f"{DRIVER}:wrap_load_checkpoint",
        }
    ),
    "verl.trainer.ppo.v1.trainer_base": wrap(
        {
            "PPOTrainer._save_checkpoint": f"{DRIVER}:wrap_save_checkpoint",
            "PPOTrainer._load_checkpoint": f"{DRIVER}:wrap_load_checkpoint",
            "PPOTrainer.fit": f"{DRIVER}:wrap_fit",
        }
    ),
}
"""Patch of each module of veRL, by the module's name."""


if Version("0.9.1") > VERL:
    raise ConfigError(
        f"the switch for veRL's trainers needs veRL 0.9.1, and this is {VERL}; install "
        "it, or unset VERL_USE_EXTERNAL_MODULES"
    )
patch_after_import(PATCHES)
