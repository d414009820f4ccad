"""What ranks need, imported once for all of them; see ``ranks``."""

from grpo_copy.cpu_platform import use_cpu

use_cpu()  # before veRL looks for a device

import trinity_sync.integrations.verl.fsdp.manager  # noqa: E402, F401
