"""What ranks need, imported once for all of them; see ``tests.integration.fsdp.ranks``."""

from grpo_copy.cpu_platform import use_cpu

use_cpu()  # before veRL looks for a device

from tests.environments.megatron import training  # noqa: E402, F401
from trinity_sync.integrations.verl import megatron  # noqa: E402, F401
