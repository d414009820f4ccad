"""Private names of torch stand in two modules, which refuse a torch that lacks one."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import trinity_sync
from trinity_sync.tensors import torch_private

PROJECT = Path(trinity_sync.__file__).parents[1]
MODULE = Path(torch_private.__file__)
OWNERS = (
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
    torch.nn.Module(),
    torch.optim.Optimizer,
    DTensor,
    DeviceMesh,
    FullyShardedDataParallel,
    torch.distributed.ProcessGroup,
)
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")


def names_in(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Private names that are attributes, keywords or words of a text that documents nothing."""
    tree = ast.parse(source)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.keyword):
            found = [node.arg or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [] if id(node) in documentation else PRIVATE.findall(node.value)
        else:
            continue
        yield from ((node, name) for name in found if PRIVATE.fullmatch(name))


OF_DCP = MODULE.with_name("torch_private_dcp.py")
OF_FILES = MODULE.with_name("archive.py")
"""Names the classes that a file of ``torch.save`` names, and imports no torch."""
KNOWN = {name for path in (MODULE, OF_DCP) for _, name in names_in(path.read_text())}
KNOWN |= {name for owner in OWNERS for name in dir(owner) if PRIVATE.fullmatch(name)}
KNOWN |= set(torch_private.WRAPPED)


def used_in(source: str) -> list[str]:
    """Private names of torch that a module uses."""
    found = []
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                (f"{node.module}.{each.name}", each.asname or each.name) for each in node.names
            ]
        else:
            continue
        for name, bound in names:
            if name.split(".")[0] == "torch":
                roots.add(bound)
                found += [name] if PRIVATE.search(name) else []
    for node, name in names_in(source):
        text = ast.unparse(node)
        if isinstance(node, ast.Attribute):
            own = text.startswith(("self.", "cls."))
            if text.split(".")[0] in roots or (name in KNOWN and not own):
                found.append(text)
        elif name in KNOWN:
            found.append(text)
    return found


@pytest.mark.parametrize("package", ["trinity_sync", "flows", "tasks"])
def test_private_names_of_torch_are_used_where_they_are_looked_up(package: str) -> None:
    modules = set((PROJECT / package).rglob("*.py")) - {MODULE, OF_DCP, OF_FILES}
    assert {path: names for path in modules if (names := used_in(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor._dtensor_spec",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "state.tensor.untyped_storage()._cdata",
        "torch.TypedStorage(wrap_storage=storage, _internal=True)",
        "wanted = f'{name}._fsdp_wrapped_module.weight'",
    ],
)
def test_a_private_name_elsewhere_is_found(source: str) -> None:
    assert used_in(source)


def test_a_torch_that_lacks_a_name_is_refused_by_that_name() -> None:
    lacks = "torch.distributed.tensor.DTensor._spec"
    program = f"""
import torch.distributed.tensor
from torch.distributed.checkpoint import metadata
from trinity_sync.errors import TrinitySyncError
del {lacks}
torch.__version__ = "2.20.1+cu140"
try:
    import trinity_sync.formats.dcp
except TrinitySyncError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == (
        f"torch 2.20.1+cu140 has no {lacks}, which trinity_sync needs; install "
        f"torch>={torch_private.OLDEST},<2.20"
    ), done.stderr


def test_an_older_torch_is_told_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    with pytest.raises(ImportError, match=f"install torch>={torch_private.OLDEST}$"):
        torch_private.look_up("torch._no_such_name")


def test_the_oldest_torch_is_that_of_the_requirements() -> None:
    assert f'"torch>={torch_private.OLDEST}",' in (PROJECT / "pyproject.toml").read_text()
