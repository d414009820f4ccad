"""MkDocs hook: reference pages made from the code, and files of the repository as downloads.

A line ``<!-- generated: NAME -->`` of a page is replaced by the output of `reference.GENERATORS`,
and ``<!-- file: PATH -->`` by a file of the repository. A link that leaves ``docs/`` and works in
the repository gets a copy of the file on the site.
"""

import itertools
import os
import posixpath
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import reference
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[2]
SEARCH = {"contributing/": {"exclude": True}}
"""What the search leaves out: a pasted message leads to what to do, not to how it is made."""
EXPLAINED = ("operations/failures.html", "reference/messages.html")
"""Pages that say what to do about a message."""
_QUOTED: list[tuple[str, str]] = []
"""Where a page quotes a message, and what it quotes."""
UNSEEN = ("docs/contributing/invariants.md", "docs/contributing/tests.md")
"""Lists for who changes the code: the site has them as files. ``mkdocs.yml`` excludes them."""
LONG = 18
"""Characters of a cell from which on it is a text."""
DOWNLOADS = "files"
"""Folder of the site with the files of the repository that pages link to."""
PAGES = {"contributing/index.md": "CONTRIBUTING.md", "contributing/changelog.md": "CHANGELOG.md"}
"""Pages that are files of the repository."""

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)([^)]*\))")
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Find the packages of the checkout and hooks; take Mermaid from a file (``MERMAID_JS=...``).

    Without the file, a reader's browser loads Mermaid from a network.
    """
    sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]
    if os.environ.get("MERMAID_JS"):
        config.extra_javascript.append("assets/mermaid.min.js")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and downloads that are not below ``docs/``."""
    if script := os.environ.get("MERMAID_JS"):
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=script))
    for page, source in PAGES.items():
        text = (REPOSITORY / source).read_text()
        text = _LINK_INTO_DOCS.sub(r"](../", text)
        files.append(File.generated(config, page, content=text))
    linked = {
        target
        for file in files.documentation_pages()
        if file.abs_src_path
        for target in _links_outside(file.src_uri, Path(file.abs_src_path).read_text())
    }
    for target in sorted(linked):
        if (REPOSITORY / target).is_file():  # another target is left, and so reported
            path = str(REPOSITORY / target)
            files.append(File.generated(config, _download(target), abs_src_path=path))
    return files


_LINK_INTO_DOCS = re.compile(r"\]\(docs/")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert what is generated, and point links that leave ``docs/`` at the downloads."""
    markdown = _DIRECTIVE.sub(lambda found: reference.GENERATORS[found[1]](), markdown)
    markdown = _FILE.sub(lambda found: _insert_file(found[1]), markdown)
    own = page.file.src_uri
    for start, rank in SEARCH.items():
        if own.startswith(start):
            page.meta["search"] = rank

    def point(found: re.Match[str]) -> str:
        target = _outside(own, found[2])
        if target is None or not (REPOSITORY / target).is_file():
            return found[0]
        path = posixpath.relpath(_download(target), posixpath.dirname(own) or ".")
        return f"{found[1]}{path}{found[3]}"

    return _LINK.sub(point, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Name in each cell of a table its column, and mark long texts.

    Narrow screens show the cells below each other; on others, a column of long texts is no strip.
    """
    html = re.sub("<table>.*?</table>", _label_cells, html, flags=re.DOTALL)

    def name(quoted: re.Match[str]) -> str:
        anchor = f"message-{len(_QUOTED)}"
        _QUOTED.append((f"{page.url}#{anchor}", unescape(quoted[1])))
        return f'<code class="message" id="{anchor}">{quoted[1]}</code>'

    return re.sub('<code class="message">([^<]*)</code>', name, html)


@event_priority(50)  # before the search writes its index
def on_post_build(config: Any) -> None:
    """Add what pages quote of messages to the search, with the whole message as the title.

    A pasted message has many words, and more of them are in this title than in a heading.
    """
    (search,) = (each for each in config.plugins.values() if hasattr(each, "search_index"))
    for location, quoted in _QUOTED:
        title = " ".join(reference.find_message(quoted).replace("…", " ").split())
        boost = 4 if location.startswith(EXPLAINED) else 1
        entry = {"location": location, "title": title, "text": quoted, "boost": boost}
        search.search_index.entries.append(entry)
    _QUOTED.clear()


def _label_cells(table: re.Match[str]) -> str:
    headings = re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)
    labels = itertools.cycle(
        re.sub("<[^>]*>", "", each).replace('"', "&quot;") for each in headings
    )

    def label(cell: re.Match[str]) -> str:
        is_long = len(" ".join(re.sub("<[^>]*>", "", cell[2]).split())) > LONG
        mark = ' class="long"' * is_long
        return f'<td data-label="{next(labels)}"{mark}{cell[1]}>{cell[2]}</td>'

    return re.sub("<td([^>]*)>(.*?)</td>", label, table[0], flags=re.DOTALL)


def _insert_file(path: str) -> str:
    text = (REPOSITORY / path).read_text().rstrip()
    return f'```python title="{path}"\n{text}\n```'


def _links_outside(page: str, text: str) -> set[str]:
    return {target for found in _LINK.finditer(text) if (target := _outside(page, found[2]))}


def _outside(page: str, link: str) -> str | None:
    """Return the path in the repository of a link that leaves ``docs/``; None for other links."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) and path not in UNSEEN else path


def _download(path: str) -> str:
    """Return where the site has a file of the repository; Markdown would become a page."""
    return f"{DOWNLOADS}/{path}" + ".txt" * path.endswith(".md")
