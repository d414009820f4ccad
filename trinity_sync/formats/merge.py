"""Merge of steps: a weighted mean of their weights, committed as a step of another root.

Averages of the last checkpoints of a training often evaluate better than any of them. A merge is no
state of the training, so it is never in the training's root: there, ``latest``, readers and a
resume would have to tell it from the steps of a run. The root of merges is a job with one run,
whose steps have the numbers of their newest sources; it has no checkpoints, so nothing resumes from
it.

The weights become one file of full tensors. It is laid out as ``torch.save`` does and filled block
by block: memory holds less than a MiB of them.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.formats.hf_files import ADAPTER_CONFIG
from trinity_sync.formats.shard_reader import SavedState, open_shard
from trinity_sync.fs.atomic import make_folder, move, open_fd, remove_tree, sync_file, sync_folder
from trinity_sync.fs.direct_io import OnProgress, digest_parts, map_fd, no_progress
from trinity_sync.fs.locks import acquire_commit_lock, acquire_file_lock
from trinity_sync.layout import (
    PRIVATE_FOLDER,
    check_name,
    check_root,
    shard_file,
    step_folder,
    steps_on_disk,
)
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.removal import make_step_info
from trinity_sync.snapshot.identity import job_id, open_identity
from trinity_sync.snapshot.image import lay_out
from trinity_sync.storage.discovery import (
    list_newest_first,
    list_shards,
    read_manifest_state,
    require_unreplaced,
    update_latest_pointers,
)
from trinity_sync.storage.manifest import FileHealth, FileRecord, Manifest, write_manifest_into
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.replace import fetching_folder
from trinity_sync.storage.restore import load_bytes, require_digests
from trinity_sync.storage.runs import list_runs, open_run
from trinity_sync.storage.steps_in_use import lease_to_read, resolve_step
from trinity_sync.tensors.dtensors import ShardBox, make_whole_box
from trinity_sync.tensors.health import ValueScan
from trinity_sync.tensors.memcpy import view_bytes
from trinity_sync.tensors.unshard import map_names

OnRead = Callable[[int], object]
"""Is called with numbers of bytes."""
MERGES = "merges"
"""Key of the run of a root of merges."""
_BLOCK = 1 << 15
"""Elements that are averaged at a time: for more, torch has threads meet at each operation, which
took two busy cores five to thirty times as long."""
_POLICY = re.compile(r"(?!best=[^:]*:(min|max)$)[a-z]+=.*")
"""A word of a policy; ``best=reward:max`` names a step."""
_OF_ONE_STEP = re.compile(r".*\.(safetensors|bin|pt|pth|index\.json)")
"""Small files beside the shards that hold weights, or list such files."""


def merge_steps(
    root: str | Path,
    steps: str | Sequence[int | str],
    out: str | Path,
    *,
    weights: Sequence[float] = (),
    ema: float | None = None,
    role: str = "actor",
    exclude: Sequence[str] = (),
    on_progress: OnProgress = no_progress,
) -> Manifest:
    """Commit a weighted mean of the weights of steps as a weights-only step of another root.

    Any number of ranks may have saved the sources. They are leased meanwhile, and compared with
    their digests. The mean is computed in ``float64`` and rounded to the dtype of the sources.
    Tensors that are not floating point, config and tokenizer are those of the newest source, whose
    number the step gets. An interrupted merge leaves no step.

    Args:
        root: the job's root.
        steps: two or more steps, each in a form that `Checkpoints.resolve` takes, or a word of a
            retention policy: ``last=5``, ``every=100``, ``best=3:reward:max``, ``newer=2d``, for
            the steps that it keeps, oldest first. As a text, with commas between them.
        out: root of merges: missing, or made by this function.
        weights: one number for each step, in their order; divided by their sum. By default, all are
            equal.
        ema: decay of an exponential moving average over the steps in their order, from 0 to 1,
            instead of ``weights``: each step multiplies the average so far by it.
        role: role whose weights are merged.
        exclude: patterns of tensor names, such as ``*.router.*``, that are not averaged, but taken
            from the newest source.
        on_progress: called with bytes and the total; each byte counts twice, for its digest and its
            share in the mean.

    Returns:
        Manifest of the merged step; its ``parents`` are the sources.

    Raises:
        CommitError: a source is not committed or corrupted, or its shards cannot be put together;
            or ``out`` has a step of this number.
        ConfigError: an argument is invalid, or the sources have other tensors than each other.
        OSError: the disk is full or broken.
    """
    check_name("role", role)
    base = Path(root).resolve()
    chosen = choose_steps(base, steps)
    shares = compute_shares(chosen, weights, ema)
    with ExitStack() as held:
        leases = (lease_to_read(base, step, f"merge of {role}") for step in chosen)
        manifests = [*map(held.enter_context, leases)]
        newest = max(manifests, key=lambda each: (each.run, each.step))
        target = _check_target(out, base, newest.step)
        shards = [list_shards(base, manifest, role, "model") for manifest in manifests]
        total = 2 * sum(record.nbytes for records in shards for record in records)
        saved = _open_sources(base, manifests, shards, lambda n: on_progress(n, total))
        sources = _Sources(manifests, saved, shares, manifests.index(newest), exclude)
        folder = step_folder(fetching_folder(target), newest.step)
        make_folder(folder.parent)
        lock = target / PRIVATE_FOLDER / "fetching.lock"
        held.enter_context(acquire_file_lock(lock, limit_s=math.inf))  # downloads hold it as well
        remove_tree(folder)  # of a merge that was killed
        held.callback(remove_tree, folder)
        files = _write_files(folder, base, sources, role, lambda n: on_progress(n, total))
        of = tuple(m.as_parent(base, share) for m, share in zip(manifests, shares, strict=True))
        made = Manifest("", 0, newest.step, ("state_dict",), tuple(files), (), 0.0, parents=of)
        return _commit(target, folder, base, made)


def choose_steps(root: Path, steps: str | Sequence[int | str]) -> list[int]:
    """Return the steps that numbers, names and words of policies choose, each once, in order.

    Raises:
        ConfigError, CommitError: as `resolve_step`, or fewer than two are chosen.
    """
    words = [word.strip() for word in steps.split(",")] if isinstance(steps, str) else steps
    chosen: dict[int, None] = {}
    for word in words:
        is_policy = isinstance(word, str) and _POLICY.fullmatch(word)
        found = _list_kept(root, str(word)) if is_policy else [resolve_step(root, word)]
        chosen.update(dict.fromkeys(found))
    if len(chosen) < 2:
        raise ConfigError(
            f"{steps!r} chooses {len(chosen)} step(s) of {root}, and a merge takes two or more; "
            f"trinity-sync ls {root} lists the steps"
        )
    return [*chosen]


def _list_kept(root: Path, word: str) -> list[int]:
    """Return the valid steps that a word of a policy keeps, oldest first; checkpoints, if any.

    Superseded steps are left out.
    """
    policy, found = parse_policy(word), list_newest_first(root, "checkpoint", reduced=True)
    valid = [
        make_step_info(each, metrics=read_metrics(root, each.run, each.step))
        for each in reversed(found or list_newest_first(root, "state_dict"))
        if read_manifest_state(root, each, runs=()).state == "valid"
    ]
    if word.startswith("best="):  # which also keeps the steps that have no metric yet
        valid = [each for each in valid if word.split(":")[1] in each.metrics] or valid
    kept = policy.keeps(valid, time.time())
    return [each.step for each in valid if each.step in kept]


def compute_shares(
    steps: Sequence[int], weights: Sequence[float], ema: float | None
) -> list[float]:
    """Return the share of each step; they add up to 1.

    Raises:
        ConfigError: both weights and a decay are given, or one is out of range.
    """
    count, given = len(steps), [*map(float, weights)]
    if ema is not None:
        if given or not 0 < ema < 1:
            raise ConfigError(f"ema {ema} is not between 0 and 1, or was passed with weights")
        first, *later = (ema ** (count - 1 - n) for n in range(count))
        given = [first, *((1 - ema) * each for each in later)]
    given = given or [1.0] * count
    if len(given) != count or not all(0 < each < math.inf for each in (*given, sum(given))):
        raise ConfigError(
            f"weights {given} do not fit the steps {', '.join(map(str, steps))}: pass a positive "
            "number for each step"
        )
    return [each / sum(given) for each in given]


def _check_target(out: str | Path, root: Path, step: int) -> Path:
    """Return the full path of a root of merges; ``root`` is that of the training, in full.

    Raises:
        CommitError: it has the step.
        ConfigError: it is the root of a training, or part of one.
    """
    check_root(out)
    target, runs = Path(out).resolve(), list_runs(out)
    is_other = any(each.key != MERGES for each in runs) or (not runs and steps_on_disk(target))
    if is_other or target == root or PRIVATE_FOLDER in target.parts:
        raise ConfigError(
            f"{out} is the root of a training, in which a merge would count as one of its steps; "
            "pass another folder"
        )
    if step_folder(target, step).exists():
        raise CommitError(
            f"{out} has a step {step} already, which stays as it is: pass another folder, or "
            f"remove {step_folder(target, step)}"
        )
    return target


@dataclass(frozen=True)
class _Sources:
    """The states to merge with their shares, in the order of ``manifests``."""

    manifests: Sequence[Manifest]
    saved: Sequence[SavedState]
    shares: Sequence[float]
    newest: int
    exclude: Sequence[str]

    def iter_mean(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor of the mean, block by block."""
        shape, dtype = self.saved[self.newest].metas[name]
        is_newest = not dtype.is_floating_point or any(fnmatchcase(name, e) for e in self.exclude)
        if not is_newest and dtype.itemsize == 1:
            how = "its scale is another tensor, so it has no mean: merge weights of another dtype"
            raise ConfigError(f"{name} is {dtype}, and {how}, or exclude it and its scale")
        for box in _iter_boxes(shape):
            if is_newest:
                mean = torch.empty(box.sizes, dtype=dtype, device="cpu")
                self.saved[self.newest].copy_box(name, box, mean)
            else:
                mean = torch.zeros(box.sizes, dtype=torch.float64, device="cpu")
                part = torch.empty_like(mean)
                for saved, share in zip(self.saved, self.shares, strict=True):
                    saved.copy_box(name, box, part)
                    mean += part.mul_(share)  # without FMA: the same everywhere
            yield mean.to(dtype).reshape(-1).view(torch.uint8).numpy().data


def _open_sources(
    root: Path,
    manifests: Sequence[Manifest],
    shards: Sequence[Sequence[FileRecord]],
    on_read: OnRead,
) -> list[SavedState]:
    """Compare the weights of leased steps with their digests, and open them.

    Raises:
        CommitError: as `merge_steps`.
        ConfigError: the steps have other tensors than each other.
    """
    opened: list[SavedState] = []
    for manifest, records in zip(manifests, shards, strict=True):
        folder = step_folder(root, manifest.step)
        require_digests(folder, records, on_read)
        opened.append(SavedState([folder / record.path for record in records]))
        require_unreplaced(root, manifest)  # mapped files stay those of this commit
        first, metas = opened[0].metas, opened[-1].metas
        if differing := sorted({name for name, _ in first.items() ^ metas.items()}):
            raise ConfigError(
                f"steps {manifests[0].step} and {manifest.step} do not have the same tensors: "
                f"names, shapes or dtypes of {', '.join(differing[:5])} differ. Merge steps of one "
                "model"
            )
    return opened


def _write_files(
    folder: Path, root: Path, sources: _Sources, role: str, on_read: OnRead
) -> list[FileRecord]:
    """Write the files of a merged step durably, and return their records."""
    newest, of_newest = sources.manifests[sources.newest], sources.saved[sources.newest]
    shards = list_shards(root, newest, role, "model")
    state = dict(open_shard(step_folder(root, newest.step) / shards[0].path))
    others = {n: state[given] for n, given in map_names(state).items() if n not in of_newest.metas}
    files = [_write_mean(folder, role, sources, others, on_read)]
    for record in newest.files:
        is_small = (record.role, record.component) == (role, "metadata")
        is_small = is_small or record.path == f"attachments/{ADAPTER_CONFIG}"
        if is_small and not _OF_ONE_STEP.fullmatch(record.path):
            content = load_bytes(root, newest.step, record.path, manifest=newest)
            make_folder((folder / record.path).parent)
            (folder / record.path).write_bytes(content)
            sync_file(folder / record.path)
            files.append(record)
    return files


def _write_mean(
    folder: Path, role: str, sources: _Sources, others: Mapping[str, Any], on_read: OnRead
) -> FileRecord:
    """Write a file of ``torch.save`` with the mean and the values ``others``, durably."""
    tied: dict[Any, torch.Tensor] = {}
    state, names = dict[str, Any](others), dict[int, str]()
    for name, (shape, dtype) in sources.saved[sources.newest].metas.items():
        # only what is tied in all sources is tied in the mean
        place = tuple(id(each.tensors[name]) for each in sources.saved)
        if place not in tied:  # memory that is never touched takes none
            tied[place] = torch.empty(shape, dtype=dtype, device="cpu")
            names[tied[place].data_ptr()] = name
        state[name] = tied[place]
    layout, storages = lay_out(state)
    path = folder / role / shard_file("model", 1, 0)
    make_folder(path.parent)
    with path.open("xb") as file:
        for offset, content in layout.extents:
            file.seek(offset)
            file.write(content)
        for (offset, _), storage in zip(layout.holes, storages, strict=True):
            file.seek(offset)
            name = names.get(storage.data_ptr(), "")
            for part in sources.iter_mean(name) if name else [view_bytes(storage).numpy().data]:
                file.write(part)
                on_read(len(part) * len(sources.saved))
    sync_file(path)
    with open_fd(path) as fd:
        image = map_fd(fd, layout.nbytes)
        scan = ValueScan(image)
        digest = digest_parts(scan.walk(image))
    found = FileHealth(*scan.sum_up())
    where = path.relative_to(folder).as_posix()
    return FileRecord(where, layout.nbytes, digest, role, "model", 0, 1, health=found)


def _iter_boxes(shape: Sequence[int]) -> Iterator[ShardBox]:
    """Yield the parts of a tensor of at most `_BLOCK` elements, in the order of its bytes."""
    if prod(shape) <= _BLOCK:
        yield make_whole_box(shape)
        return
    rows = _BLOCK // prod(shape[1:])
    for index in range(0, shape[0], max(rows, 1)):
        for inner in [make_whole_box(shape[1:])] if rows else _iter_boxes(shape[1:]):
            sizes = min(max(rows, 1), shape[0] - index), *inner.sizes
            yield ShardBox((index, *inner.offsets), sizes)


def _commit(out: Path, folder: Path, root: Path, manifest: Manifest) -> Manifest:
    """Rename the folder of a merged step into the root of merges, with its manifest."""
    open_identity(out)
    with acquire_commit_lock(out) as lock:
        _check_target(out, root, manifest.step)  # a training may have begun there
        run = open_run(out, MERGES, 0)
        done = replace(
            manifest, job=job_id(out), run=run.number, run_key=run.key, committed_at=time.time()
        )
        write_manifest_into(folder, done)
        lock.require_held()
        move(folder, step_folder(out, done.step))
        sync_folder(out)
        update_latest_pointers(out, done)
    return done
