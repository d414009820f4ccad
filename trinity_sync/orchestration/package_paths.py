"""Paths of the packages ``flows`` and ``tasks``, and what ``prefect.yaml`` in them deploys.

Only the stack's own processes import them. In a checkout they are at the top. A wheel holds them
below ``trinity_sync/packages``, because users have packages of these names: it installs none of
them at the top. The stack's processes have `PACKAGES` first on ``sys.path``.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from trinity_sync.client.prefect_api import PrefectApi

_PACKAGE = Path(__file__).parents[1]
_PACKAGED = _PACKAGE / "packages"

INSTALLED = str(_PACKAGE.parent)
"""The folder that ``trinity_sync`` and its dependencies are installed into."""
PACKAGES = str(_PACKAGED) if _PACKAGED.is_dir() else INSTALLED
"""The folder that holds ``flows`` and ``tasks``."""
TASK_PROCESSES = 4
"""Processes that Ray keeps on a node: one for each component that most saves have."""


def read_deployments() -> list[dict[str, Any]]:
    """Return the entries of prefect.yaml."""
    import yaml  # of the stack's environment

    text = Path(PACKAGES, "flows", "prefect.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.safe_load(text)["deployments"]
    return entries


async def find_missing_deployments(api: PrefectApi, pool: str) -> list[str]:
    """Return the names of deployments that a work pool lacks, or has with other parameters than
    those of prefect.yaml, if it names any; none outside of the stack's environment."""
    found = await api.read_deployments(pool)
    deployed = {name: each.get("parameters") for name, each in found.items()}
    with suppress(ImportError):
        return [
            each["name"]
            for each in read_deployments()
            if each["name"] not in deployed
            or each.get("parameters", deployed[each["name"]]) != deployed[each["name"]]
        ]
    return []
