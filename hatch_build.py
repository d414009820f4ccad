"""What a registry shows of this project: the README with links that work there, and where it is.

The URLs of the repository and of the site stand nowhere in it: the release passes them.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "REPOSITORY_URL"
"""Variable with the URL; without it, links into the repository are plain text."""
SITE = "SITE_URL"
"""Variable with the URL of the documentation, which has the pages of ``docs/``."""


class ReadmeHook(MetadataHookInterface):
    """Sets the fields ``readme`` and ``urls``."""

    def update(self, metadata: dict) -> None:
        """Set the fields."""
        url = os.environ.get(REPOSITORY, "").rstrip("/")
        site = os.environ.get(SITE, "").rstrip("/")
        text = Path(self.root, "README.md").read_text()
        text = re.sub(r"```mermaid\n.*?```\n\n", "", text, flags=re.DOTALL)
        if site:
            text = re.sub(r"\]\(docs/([\w/-]+)\.md(#[\w-]+)?\)", rf"]({site}/\1.html\2)", text)
        link = rf"[\1]({url}/blob/v{metadata['version']}/\2)" if url else r"\1"
        text = re.sub(r"\[([^\]\[]+)\]\((?!\w+:|#)([^)\s]+)\)", link, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if url:
            metadata["urls"] = {
                "Source": url,
                "Documentation": site or f"{url}/blob/main/docs/index.md",
                "Changelog": f"{url}/blob/main/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
