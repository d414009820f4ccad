"""What ranks need, imported once for all of them; see ``ranks``."""

from grpo_copy.cpu_platform import use_cpu

use_cpu()  # before veRL looks for a device

import tests.integration.fsdp.commits  # noqa: E402
import tests.integration.fsdp.models  # noqa: E402, F401
