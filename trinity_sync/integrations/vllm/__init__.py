"""vLLM: rollouts with the weights of a running training.

vLLM loads ``plugin`` in each of its processes, so this package imports nothing with it; ``engine``
runs in its workers, ``updater`` in the process that decides when to update.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_sync.integrations.vllm.updater import VLLMUpdater

__all__ = ["VLLMUpdater"]

if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name != "VLLMUpdater":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from trinity_sync.integrations.vllm.updater import VLLMUpdater

        return VLLMUpdater
