"""The switch for Trinity-RFT 0.6: one environment variable, no fork.

::

    export TRINITY_PLUGIN_DIRS="$(python -m trinity_sync.integrations.trinity.switch)"
    trinity run --config my.yaml

Trinity's launcher, trainer and explorers load the plugins of that folder first, and its plugin
imports this module, which is the switch. A few names of Trinity's modules are replaced (`PATCHES`),
each right after Trinity has imported the module; this module itself imports nothing heavy. The
trainer's worker processes need no switch: they are started with our classes. Nor do those that
serve the model: they look the Synchronizer up by Trinity's name, which ours has.
"""

from pathlib import Path
from types import ModuleType

from trinity_sync.integrations.after_import import Patch, patch_after_import, rebind

PLUGINS = Path(__file__).parent / "plugin"


def _launch(module: ModuleType) -> None:
    from trinity_sync.integrations.trinity.job import wrap_get_envs

    module.Config.get_envs = wrap_get_envs(module.Config.get_envs)


def _synchronizer(module: ModuleType) -> None:
    def get_actor(config: object = None, namespace: str | None = None) -> object:
        from trinity_sync.integrations.trinity.synchronizer import TrinitySynchronizer

        return TrinitySynchronizer.get_actor(config, namespace)

    module.Synchronizer.get_actor = staticmethod(get_actor)


def _position(module: ModuleType) -> None:
    from trinity_sync.integrations.trinity.job import wrap_sample_strategy_init

    module.SampleStrategy.__init__ = wrap_sample_strategy_init(module.SampleStrategy.__init__)


def _monitor(module: ModuleType) -> None:
    from trinity_sync.integrations.trinity.metrics import wrap_get_monitor

    module.MONITOR.get = wrap_get_monitor(module.MONITOR.get)


def _engine(module: ModuleType) -> None:
    from trinity_sync.integrations.trinity import engine, workers

    names = vars(module)
    names["VERLTrainer"] = engine.Engine
    names["CheckpointMonitor"] = engine.NoMonitor
    names["TrinityActorRolloutRefWorker"] = workers.ActorWorker
    names["TrinityCriticWorker"] = workers.CriticWorker


def _resume(module: ModuleType) -> None:
    from trinity_sync.integrations.verl.driver import wrap_find_latest_ckpt_path

    ours = wrap_find_latest_ckpt_path(module.find_latest_ckpt_path)
    rebind(module, "find_latest_ckpt_path", ours, within=["verl", "trinity"])


PATCHES: dict[str, Patch] = {
    "trinity.algorithm.sample_strategy.sample_strategy": _position,
    "trinity.common.config": _launch,
    "trinity.manager.synchronizer": _synchronizer,
    "trinity.trainer.verl.trainer": _engine,
    "trinity.utils.monitor": _monitor,
    "verl.utils.checkpoint.checkpoint_manager": _resume,
}
"""Patch of each module of Trinity or veRL, by the module's name."""


if __name__ == "__main__":
    print(PLUGINS)
else:
    patch_after_import(PATCHES)
