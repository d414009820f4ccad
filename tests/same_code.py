"""Compare the code of two revisions: ``python -m tests.same_code OLD NEW [--moved]``.

Without an option, each file's code has to be the same but for docstrings. With ``--moved``, each
function, class and assignment at the top of a module has to exist as often in both, in any file;
what differs is listed. ``NEW`` may be left out for the working tree.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "trinity_sync", "flows", "tasks"


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
            if len(node.body) > 1:  # type: ignore[attr-defined]
                node.body = [each for each in node.body if not isinstance(each, ast.Pass)]  # type: ignore[attr-defined]
        return node


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def read_revision(revision: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the tree, without docstrings, of each module of a revision."""
    if revision:
        packed = subprocess.run(
            ["git", "archive", revision, *FOLDERS], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            texts = {
                entry.name: content.read().decode()
                for entry in tar
                if entry.name.endswith(".py") and (content := tar.extractfile(entry))
            }
    else:
        paths = [path for folder in FOLDERS for path in Path(folder).rglob("*.py")]
        texts = {path.as_posix(): path.read_text() for path in paths}
    for path, text in sorted(texts.items()):
        yield path, _WithoutDocstrings().visit(ast.parse(text))


def list_parts(revision: str) -> Counter[str]:
    """Return each statement at the top of a module but for imports, as often as it stands there."""
    skipped = ast.Import, ast.ImportFrom, ast.Pass
    return Counter(
        ast.unparse(part)
        for _, tree in read_revision(revision)
        for part in tree.body
        if not isinstance(part, skipped)
    )


def main() -> int:
    """Print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="")
    parser.add_argument("--moved", action="store_true")
    given = parser.parse_args()
    if given.moved:
        old, new = list_parts(given.old), list_parts(given.new)
        for sign, parts in ("-", old - new), ("+", new - old):
            for part in sorted(parts.elements()):
                print(sign, part.replace("\n", f"\n{sign} "))
        same = old == new
        print(f"{old.total()} parts before, {new.total()} after")
    else:
        before = {path: ast.dump(tree) for path, tree in read_revision(given.old)}
        after = {path: ast.dump(tree) for path, tree in read_revision(given.new)}
        differing = [
            path for path in sorted({*before, *after}) if before.get(path) != after.get(path)
        ]
        print(*differing, sep="\n")
        same = not differing
        print(f"{len(before)} files before, {len(after)} after, {len(differing)} differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
