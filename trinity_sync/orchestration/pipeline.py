"""Locate the packages ``flows`` and ``tasks``, which only the stack's own processes import.

In a checkout they are at the top. A wheel holds them below ``trinity_sync/pipeline``, because users
have packages of these names: it installs no top-level ``flows`` or ``tasks``. The stack's processes
have `PACKAGES` first on ``sys.path``.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PIPELINE = _PACKAGE / "pipeline"

INSTALLED = str(_PACKAGE.parent)
"""The folder that ``trinity_sync`` and its dependencies are installed into."""
PACKAGES = str(_PIPELINE) if _PIPELINE.is_dir() else INSTALLED
"""The folder that holds ``flows`` and ``tasks``."""
