"""Comparison of two committed steps, tensor by tensor.

Shards are mapped, not read, and each tensor is compared in pieces, so memory stays small whatever
the size of the model. The shards of a tensor count as one tensor. Files with equal digests are not
compared.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import list_shards, require_unreplaced
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.tensors.deserialize import describe_form
from trinity_sync.tensors.safe_load import load_file
from trinity_sync.tensors.torch_private import get_shard

PIECE = 1 << 20
"""Number of elements compared at a time."""


@dataclass(frozen=True)
class TensorChange:
    """A tensor of two steps."""

    name: str
    """Name of the tensor."""
    state: str
    """``same``, ``changed``, ``new``, ``missing``, ``reshaped`` or ``retyped``."""
    shape: str
    """Shape in the later step, otherwise in the earlier one; both if they differ."""
    elements: int
    """Number of elements; 0 if they cannot be compared."""
    changed: int
    """Number of elements that are not equal."""
    changed_percent: float | None
    """Percentage of them."""
    max_abs: float | None
    """Greatest absolute difference."""
    relative_l2: float | None
    """L2 norm of the difference relative to the earlier tensor; null in JSON if that was zero."""
    nonfinite: int
    """Number of infinite or NaN elements of the later step, in files that differ."""


@dataclass
class _Comparison:
    """What is known of a tensor after some of its shards."""

    state: str = "same"
    shape: str = ""
    elements: int = 0
    changed: int = 0
    max_abs: float = 0.0
    nonfinite: int = 0
    difference: float = 0.0
    """Sum of the squares of the differences."""
    before: float = 0.0
    """Sum of the squares of the earlier tensor."""

    def summarize(self, name: str) -> TensorChange:
        """Return the change of the tensor, all of whose shards are compared."""
        compared = bool(self.elements) and self.state not in ("new", "missing", "reshaped")
        relative = math.sqrt(self.difference / self.before) if self.before else math.inf
        return TensorChange(
            name=name,
            state=self.state,
            shape=self.shape,
            elements=self.elements,
            changed=self.changed,
            changed_percent=100 * self.changed / self.elements if compared else None,
            max_abs=self.max_abs if compared else None,
            relative_l2=(relative if self.difference else 0.0) if compared else None,
            nonfinite=self.nonfinite,
        )


def diff(
    root: str | Path,
    before: int,
    after: int,
    *,
    role: str = "actor",
    component: str = "model",
    on_progress: OnProgress = no_progress,
) -> list[TensorChange]:
    """Compare a component of two committed steps of a job; return changes, the greatest first.

    Files of other users are unpickled only as far as they are plain, see ``tensors.safe_load``.

    Raises:
        CommitError: a step is not committed or corrupted, or has no such component.
        ConfigError: the steps were saved by different numbers of ranks.
    """
    with (
        lease_to_read(root, before, "diff") as first,
        lease_to_read(root, after, "diff") as second,
    ):
        old, new = (list_shards(root, each, role, component) for each in (first, second))
        if len(old) != len(new):
            raise ConfigError(
                f"{component} of {role} was saved by {len(old)} ranks at step {before} and by "
                f"{len(new)} at step {after}; different shardings cannot be compared. Merge both "
                "(python -m verl.model_merger), and compare the merged models."
            )
        changes: dict[str, _Comparison] = {}
        total = sum(record.nbytes for record in new)
        for earlier, later in zip(old, new, strict=True):
            same_file = earlier.digest == later.digest
            a = dict(_iter_tensors(_load(step_folder(root, before) / earlier.path)))
            b = dict(_iter_tensors(_load(step_folder(root, after) / later.path)))
            for name in {**a, **b}:
                change = changes.setdefault(name, _Comparison())
                _compare(change, a.get(name), b.get(name), same_file=same_file)
                on_progress(0 if describe_form(b.get(name)) else _local(b[name]).nbytes, total)
        for manifest in (first, second):
            require_unreplaced(root, manifest)
    found = [change.summarize(name) for name, change in changes.items()]
    return sorted(found, key=_by_change)


def _load(path: Path) -> Any:
    try:
        return load_file(path, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CommitError(f"{path} cannot be read as a file of torch.save: {error}") from error


def _iter_tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, with the path to each."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _iter_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from _iter_tensors(value, f"{name}.{number}" if name else str(number))


def _compare(
    change: _Comparison, a: torch.Tensor | None, b: torch.Tensor | None, *, same_file: bool
) -> None:
    """Add the comparison of one shard of a tensor to its change."""
    if form := next(filter(None, (describe_form(t) for t in (a, b) if t is not None)), ""):
        change.shape = form  # what has no strided memory is compared as a whole
        is_same = same_file or (a is not None and b is not None and _dump(a) == _dump(b))
        change.state = "same" if is_same else "changed"
        return
    shapes = [str(list(tensor.shape)) for tensor in (a, b) if tensor is not None]
    change.shape = " -> ".join(dict.fromkeys(shapes))
    if a is None or b is None:
        change.state = "new" if a is None else "missing"
        return
    x, y = _local(a), _local(b)
    if a.shape != b.shape or x.shape != y.shape:
        change.state = "reshaped"
        return
    change.elements += x.numel()
    x, y = x.reshape(-1), y.reshape(-1)
    for start in range(0, 0 if same_file else len(x), PIECE):
        pieces = x[start : start + PIECE], y[start : start + PIECE]
        if not _compare_narrow(change, *pieces):
            _compare_wide(change, *pieces)
    if a.dtype != b.dtype:
        change.state = "retyped"
        change.shape += f" {a.dtype} -> {b.dtype}".replace("torch.", "")
    elif change.changed:
        change.state = "changed"


def _dump(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _compare_narrow(change: _Comparison, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compare in 32 bits, six times as fast; return False if that could overflow or lose bits."""
    if not all(t.is_floating_point() and t.dtype != torch.float64 for t in (x, y)):
        return False
    x, y = x.float(), y.float()
    distance = y - x
    difference, before = float(torch.dot(distance, distance)), float(torch.dot(x, x))
    count = int((x.view(torch.int32) != y.view(torch.int32)).count_nonzero())  # 0.0 is not -0.0
    if not math.isfinite(difference + before) or before < 1e-30 or (count and difference < 1e-30):
        return False
    change.changed += count
    change.max_abs = max(change.max_abs, float(distance.abs_().max()))
    change.difference += difference
    change.before += before
    return True


def _compare_wide(change: _Comparison, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compare in 64 bits, for any values."""
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    given = x, y
    x, y = x.to(wide), y.to(wide)
    both_nan = x.isnan() & y.isnan()
    # large integers that differ may be the same float
    a, b = given if given[0].dtype == given[1].dtype else (x, y)
    signs = [(torch.view_as_real(t) if t.is_complex() else t).signbit() for t in (x, y)]
    turned = (signs[0] != signs[1]).reshape(len(x), -1).any(1)
    unequal = ((a != b) & ~both_nan) | ((a == b) & turned)
    change.nonfinite += int((~y.isfinite()).sum())
    change.before += float(x.abs().square().nansum())
    if unequal.any():
        change.changed += int(unequal.sum())
        distance = (y - x).abs().where(unequal, 0.0)
        greatest = float(distance.max())
        if math.isnan(greatest) or greatest > change.max_abs:
            change.max_abs = greatest
        change.difference += float(distance.square().sum())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = get_shard(tensor)
    return local.detach()


_ORDER = {"missing": 0, "new": 1, "reshaped": 2, "retyped": 3, "changed": 4, "same": 5}


def _by_change(change: TensorChange) -> tuple[int, bool, float, str]:
    size = change.relative_l2 or 0.0
    return _ORDER[change.state], not math.isnan(size), -size, change.name
