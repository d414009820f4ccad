"""Locate the packages ``flows`` and ``tasks``, which only the stack's own processes import.

In a checkout they are at the top. A wheel holds them below ``trinity_sync/packages``, because users
have packages of these names: it installs no top-level ``flows`` or ``tasks``. The stack's processes
have `PACKAGES` first on ``sys.path``.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PACKAGED = _PACKAGE / "packages"

INSTALLED = str(_PACKAGE.parent)
"""The folder that ``trinity_sync`` and its dependencies are installed into."""
PACKAGES = str(_PACKAGED) if _PACKAGED.is_dir() else INSTALLED
"""The folder that holds ``flows`` and ``tasks``."""
