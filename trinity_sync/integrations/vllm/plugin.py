"""Register the back end ``trinity_sync`` for vLLM's weight transfer.

The entry point ``vllm.general_plugins`` makes vLLM call `register` in each of its processes,
wherever this package is installed. An exception of a plug-in ends vLLM, so `register` raises none.
"""

import logging

BACKEND = "trinity_sync"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the back end, once; do nothing in a vLLM that has no weight transfer."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        if BACKEND not in Factory._registry:
            Factory.register_engine(
                BACKEND, "trinity_sync.integrations.vllm.engine", "TrinitySyncEngine"
            )
    except ModuleNotFoundError:
        logger.debug("this vLLM has no weight transfer; publish folders for it")
    except Exception as error:
        logger.warning(
            "the back end %s is not available, this vLLM is not supported: %r", BACKEND, error
        )
