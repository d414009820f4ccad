"""What Prefect loads in each environment that has this package: the worker type ``trinity-sync``.

Any program that uses Prefect there loads it, also beside a version that the stack does not support
and where the stack is not installed. So importing this module never raises.
"""

import logging

logger = logging.getLogger(__name__)

try:
    import trinity_sync.orchestration.worker  # noqa: F401
except Exception as error:
    logger.warning("the worker type trinity-sync is not available: %s", error)
