"""Register the back end ``trinity_sync`` for vLLM's weight transfer.

The entry point ``vllm.general_plugins`` makes vLLM call `register` in each of its processes.
"""

import logging

BACKEND = "trinity_sync"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the back end, once; do nothing in a vLLM that has no weight transfer."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        logger.debug("this vLLM has no weight transfer; see the worker extension")
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "trinity_sync.integrations.vllm.engine", "TrinitySyncEngine"
        )
