"""What a registry shows of this project: the README with links that work there, and where it is.

The URL of the repository stands nowhere in it: the release passes the one that it runs in.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "REPOSITORY_URL"
"""Variable with the URL; without it, links into the repository are plain text."""


class ReadmeHook(MetadataHookInterface):
    """Sets the fields ``readme`` and ``urls``."""

    def update(self, metadata: dict) -> None:
        """Set the fields."""
        url = os.environ.get(REPOSITORY, "").rstrip("/")
        text = Path(self.root, "README.md").read_text()
        text = re.sub(r"```mermaid\n.*?```\n\n", "", text, flags=re.DOTALL)
        link = rf"[\1]({url}/blob/v{metadata['version']}/\2)" if url else r"\1"
        text = re.sub(r"\[([^\]\[]+)\]\((?!\w+:|#)([^)\s]+)\)", link, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if url:
            metadata["urls"] = {
                "Source": url,
                "Documentation": f"{url}/blob/main/docs/index.md",
                "Changelog": f"{url}/blob/main/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
