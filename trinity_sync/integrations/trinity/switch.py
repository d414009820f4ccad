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

from trinity_sync.integrations.import_hooks import Patch, patch_after_import, wrap

PLUGINS = Path(__file__).parent / "plugin"


def _synchronizer(module: ModuleType) -> None:
    def get_actor(config: object = None, namespace: str | None = None) -> object:
        from trinity_sync.integrations.trinity.synchronizer import TrinitySynchronizer

        return TrinitySynchronizer.get_actor(config, namespace)

    module.Synchronizer.get_actor = staticmethod(get_actor)


def _engine(module: ModuleType) -> None:
    from trinity_sync.integrations.trinity import engine, workers

    names = vars(module)
    names["VERLTrainer"] = engine.Engine
    names["CheckpointMonitor"] = engine.NoMonitor
    names["TrinityActorRolloutRefWorker"] = workers.ActorWorker
    names["TrinityCriticWorker"] = workers.CriticWorker


OURS = "trinity_sync.integrations"

PATCHES: dict[str, Patch] = {
    "trinity.algorithm.sample_strategy.sample_strategy": wrap(
        {"SampleStrategy.__init__": f"{OURS}.trinity.job:wrap_sample_strategy_init"}
    ),
    "trinity.common.config": wrap({"Config.get_envs": f"{OURS}.trinity.job:wrap_get_envs"}),
    "trinity.explorer.explorer": wrap(
        {"Explorer._pull_latest_weights": f"{OURS}.trinity.job:wrap_pull_latest_weights"}
    ),
    "trinity.manager.synchronizer": _synchronizer,
    "trinity.trainer.verl.trainer": _engine,
    "trinity.utils.monitor": wrap({"MONITOR.get": f"{OURS}.trinity.metrics:wrap_get_monitor"}),
    "verl.utils.checkpoint.checkpoint_manager": wrap(
        {"find_latest_ckpt_path": f"{OURS}.verl.driver:wrap_find_latest_ckpt_path"},
        within=["verl", "trinity"],
    ),
}
"""Patch of each module of Trinity or veRL, by the module's name."""


if __name__ == "__main__":
    print(PLUGINS)
else:
    patch_after_import(PATCHES)
