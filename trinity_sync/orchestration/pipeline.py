"""Where the packages ``flows`` and ``tasks`` are, which only the stack's own processes import.

In a checkout they stand at its top. A wheel carries them below ``trinity_sync/pipeline``, because
users' own code has modules of these names: whatever environment the wheel is installed into, it
puts no ``flows`` and no ``tasks`` there. The stack's processes have `PACKAGES` first on their path.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PIPELINE = _PACKAGE / "pipeline"

INSTALLED = str(_PACKAGE.parent)
"""The folder that ``trinity_sync`` was installed into, and with it what the stack needs."""
PACKAGES = str(_PIPELINE) if _PIPELINE.is_dir() else INSTALLED
"""The folder that holds ``flows`` and ``tasks``."""
