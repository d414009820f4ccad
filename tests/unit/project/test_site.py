"""The documentation site as readers see it: built, and shown in a browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.project.test_docs import REPOSITORY

PHONE, DESKTOP = 390, 1280
"""Widths of a phone and of a small desktop, in pixels."""
SYNTAX = re.compile(r"```|\|\s*:?-{3,}|<!--|^\s*(?:!!!|\?\?\?|===) |^\s*\|.*\||\{: ", re.MULTILINE)
"""What Markdown leaves in a text that it has not understood."""
SHOWN_AT_WIDTH = """<script>
addEventListener("load", () => {
  const found = {}
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = page.documentElement.clientWidth
    const tooWide = each => each.getBoundingClientRect().right > width
    const lines = cell => {
      const range = page.createRange()
      range.selectNodeContents(cell)
      return new Set([...range.getClientRects()].map(each => Math.round(each.bottom / 8))).size
    }
    const isNarrow = cell => {
      const em = parseFloat(getComputedStyle(cell).fontSize)
      return width > 1000 && cell.clientWidth < 12 * em - 1 && lines(cell) > 2
    }
    found[frame.title] = [width, page.documentElement.scrollWidth,
      [...page.querySelectorAll("article :is(h1, p, li, table, td, pre)")].filter(tooWide),
      [...page.querySelectorAll("article td")].filter(isNarrow),
      [...page.querySelectorAll("article :is(pre > code, .md-typeset__scrollwrap)")].filter(each =>
        each.scrollWidth > each.clientWidth + 1)]
    found[frame.title] = found[frame.title].map(each => each.map ?
      each.map(one => one.textContent.slice(0, 60)) : each)
  }
  document.body.textContent = JSON.stringify(found)
})
</script>"""


@pytest.fixture(scope="module")
def site() -> Path:
    """What `make docs` builds, built now unless that was since the last change."""
    built = REPOSITORY / "build/site"
    parts = ("docs", "trinity_sync", "flows", "tasks", "examples", "benchmarks", "deploy")
    sources = [REPOSITORY / "mkdocs.yml", *REPOSITORY.glob("*.md")]
    sources += [path for part in parts for path in (REPOSITORY / part).rglob("*.*")]
    changed = max(path.stat().st_mtime for path in sources if "__pycache__" not in path.parts)
    index = built / "index.html"
    if not index.exists() or index.stat().st_mtime < changed:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    return built


def read_prose(page: Path) -> str:
    """What a page says outside of code."""
    text = re.sub(r"<(code|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_no_page_shows_markdown_that_was_not_understood(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    shown = {page.name: SYNTAX.findall(read_prose(page)) for page in pages}
    assert {name: found for name, found in shown.items() if found} == {}


def test_the_search_has_each_message_that_is_explained_in_whole(site: Path) -> None:
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    titles = {each["location"]: each["title"] for each in found}
    for page in ("operations/failures.html", "reference/messages.html"):
        quoted = re.findall('class="message" id="(.*?)">(.*?)<', (site / page).read_text())
        assert len(quoted) > 20
        for anchor, part in quoted:
            words = html.unescape(part).replace("…", " ").split()
            assert " ".join(words[:3]) in titles[f"{page}#{anchor}"]
    assert any(re.match("the saver has ended with.*Its log is", each) for each in titles.values())


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_pages_fit_a_screen(site: Path, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here: apt-get install chromium")
    pages = ["operations/failures", "how-to/dcp", "benchmarks", "concepts/comparison"]
    pages += ["how-to/verl-settings", "how-to/huggingface", "operations/size"]
    pages += ["benchmarks/scale", "concepts/file-systems", "contributing/reports", "reference/api"]
    frames = [
        f'<iframe title="{page}" width="{width}" src="{(site / page).as_uri()}.html"></iframe>'
        for page in pages
    ]
    frame = tmp_path / "frames.html"
    frame.write_text("\n".join([SHOWN_AT_WIDTH, *frames]))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--allow-file-access-from-files", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}/profile", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (found := re.search("<body>(.*)</body>", shown.stdout)), shown.stderr
    fits = [width, width, [], [], []]  # nothing too wide, no cell that breaks words, no code cut
    assert json.loads(html.unescape(found[1])) == {page: fits for page in pages}
