"""The switch for veRL's own PPO and GRPO trainers: one variable, no fork.

::

    VERL_USE_EXTERNAL_MODULES=trinity_sync.integrations.verl python -m verl.trainer.main_ppo ...

veRL imports what the variable names in each of its processes, before anything else of its own, and
importing this module is the switch. A few names of veRL's modules become ours (`CHANGES`), each
right after veRL has imported the module; this module itself imports nothing heavy. What the names
do is in `verl_driver` and `verl_manager`.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

THIS = "trinity_sync.integrations.verl"


def _resume(module: ModuleType) -> None:
    from trinity_sync.integrations.verl_driver import finding

    _rebind(module, "find_latest_ckpt_path", finding(module.find_latest_ckpt_path))


def _save(module: ModuleType) -> None:
    def manager(*arguments: Any, **named: Any) -> Any:  # importing it imports this module of veRL
        from trinity_sync.integrations.verl_manager import TrainerCheckpointManager

        return TrainerCheckpointManager(*arguments, **named)

    module.FSDPCheckpointManager = manager  # type: ignore[attr-defined]


def _launch(module: ModuleType) -> None:
    from trinity_sync.integrations.verl_driver import launching

    _rebind(module, "get_ppo_ray_runtime_env", launching(module.get_ppo_ray_runtime_env, THIS))


def _workers(module: ModuleType) -> None:
    from trinity_sync.integrations.verl_driver import add_waiting

    add_waiting(module.TrainingWorker)
    add_waiting(module.ActorRolloutRefWorker)


def _trainer(module: ModuleType) -> None:
    from trinity_sync.integrations.verl_driver import saving

    trainer = module.RayPPOTrainer  # its fit waits for saves by itself
    trainer._save_checkpoint = saving(trainer._save_checkpoint)


def _trainer_v1(module: ModuleType) -> None:
    from trinity_sync.integrations.verl_driver import fitting, saving

    trainer = module.PPOTrainer
    trainer._save_checkpoint = saving(trainer._save_checkpoint)
    trainer.fit = fitting(trainer.fit)


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.checkpoint.checkpoint_manager": _resume,
    "verl.workers.engine.fsdp.transformer_impl": _save,
    "verl.trainer.constants_ppo": _launch,
    "verl.workers.engine_workers": _workers,
    "verl.trainer.ppo.ray_trainer": _trainer,
    "verl.trainer.ppo.v1.trainer_base": _trainer_v1,
}
"""What is done to a module of veRL, once it has been imported."""


def _rebind(module: ModuleType, name: str, new: Any) -> None:
    """Give ``name`` another meaning, also in modules of veRL that have imported it already."""
    old = getattr(module, name)
    for other in [each for key, each in sys.modules.items() if key.startswith("verl.")]:
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)


class _AfterImport(MetaPathFinder):
    """Finds the modules of `CHANGES` as Python does, and makes the change once they are run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = CHANGES.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _switch_on() -> None:
    for name, change in CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport())


_switch_on()
