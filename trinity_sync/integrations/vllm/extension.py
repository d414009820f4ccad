"""Updates of a vLLM whose weight transfer takes no back ends, by methods added to its workers.

::

    llm = LLM(model, worker_extension_cls="trinity_sync.integrations.vllm.extension.LoadVersion")
    [step] = llm.collective_rpc("load_version", kwargs={"root": root})
    llm.reset_prefix_cache()

It needs ``reload_weights(weights_iterator=...)`` of the model runner. The weights are not compared
with the model before they load; prefer the back end where there is one.
"""

from typing import Any

from trinity_sync import WeightReader
from trinity_sync.adapter import make_reader_name
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.vllm.pinned_version import Wanted, pin_version, select_version


class LoadVersion:
    """Methods that vLLM adds to each of its workers."""

    model_runner: Any
    parallel_config: Any

    def load_version(self, root: str, role: str = "actor", **wanted: Any) -> int:
        """Load a version, and return its step.

        Several workers need ``step`` and ``run``, since each of them looks for it by itself.

        Args:
            root: the job's root, an absolute path.
            role: role of the weights.
            **wanted: the fields of `Wanted`; by default the newest version is loaded.

        Raises:
            WeightSyncError: there is no such version in time, or it is gone.
            ConfigError: there are several workers, and ``step`` or ``run`` is missing.
        """
        if self.parallel_config.world_size > 1 and not {"step", "run"} <= wanted.keys():
            raise ConfigError("pass step and run, so that all workers load the same version")
        with WeightReader(root=root, role=role, name=make_reader_name("vllm")) as reader:
            version = select_version(reader, root, role, Wanted(**wanted))
            with pin_version(reader, version) as view:
                self.model_runner.reload_weights(weights_iterator=view.iter_views())
        return version.step
