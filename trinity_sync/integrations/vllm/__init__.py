"""vLLM: rollouts with the weights of a running training.

vLLM loads ``plugin`` in each of its processes; ``engine`` runs in its workers, ``updater`` in the
process that decides when to update.
"""

from trinity_sync.integrations.vllm.updater import VLLMUpdater

__all__ = ["VLLMUpdater"]
