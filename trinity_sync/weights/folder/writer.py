"""Publish versions of the weights as folders, for engines that load a Hugging Face model.

A version is written under a temporary name, made durable, and renamed; then the marker is replaced,
and only then old versions are removed. After a crash the marker names a complete version, and the
next `publish` removes what the last one left. `published` describes the files.

A version is a complete Hugging Face model, or an adapter of PEFT. Tensors are named and formed as
the engines that read the folder expect. They are compared with the model, or with the adapter,
before anything is written.
"""

import json
import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from trinity_sync.errors import ConfigError, ExportError, RemoteError, WeightSyncError, from_extra
from trinity_sync.formats.hf_files import ADAPTER_CONFIG, ADAPTER_FILE, set_dtype, split_adapter
from trinity_sync.formats.hf_naming import Architecture, Naming, Tensors, find_kept
from trinity_sync.formats.safetensors import INDEX, PROGRESS, save_tensors
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, replace_file, sync_folder
from trinity_sync.fs.locks import open_lock_file, try_acquire_file_lock
from trinity_sync.fs.process import describe_holder
from trinity_sync.fs.records import encode_record
from trinity_sync.layout import check_type
from trinity_sync.storage.runs import is_run_gone, is_superseded, list_runs
from trinity_sync.tensors.dtensors import have_equal_bits
from trinity_sync.weights.folder.bucket import open_bucket
from trinity_sync.weights.folder.delta import Change, encode_change, view_bytes, write_delta
from trinity_sync.weights.folder.published import (
    JOB_LOCK,
    MARKER,
    VERSION_FILE,
    PublishedVersion,
    VersionRecord,
    describe_tensor,
    iter_version_folders,
    list_chain,
    read_latest,
    read_version,
    remove_version,
    summarize,
    version_folder,
)
from trinity_sync.weights.folder.reader import FolderReader, PublishedView
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.version_view import VersionView

logger = logging.getLogger(__name__)

View = VersionView | PublishedView

_LOCK = ".publisher.lock"
_SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Suffixes of the files of a model that are copied: its config, tokenizer and source files."""


def _is_adapter(model: Path) -> bool:
    """Return whether a folder has the config of an adapter."""
    return (model / ADAPTER_CONFIG).is_file()


def _make_durable(folder: Path) -> None:
    """Sync a version, and let all who may read its small files read its weights."""
    mode = (folder / VERSION_FILE).stat().st_mode
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fchmod(file.fileno(), mode)  # safetensors makes files for their owner alone
            os.fsync(file.fileno())
    sync_folder(folder)


def _copy_small_files(
    model: Path, folder: Path, dtypes: Counter[torch.dtype], config: bytes | None
) -> None:
    for path in sorted(model.iterdir()):
        if (
            not path.is_file()
            or not path.name.endswith(_SMALL_FILES)
            or path.name.endswith((".index.json", PROGRESS))
        ):
            continue
        content = path.read_bytes()
        if path.name == "config.json" and dtypes:
            content = set_dtype(config or content, dtypes.most_common(1)[0][0])
        (folder / path.name).write_bytes(content)


class _ViewNaming:
    """Names and forms of the tensors of all versions of the model or adapter that engines serve.

    ``trust_remote_code`` lets source files of the model be imported.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool) -> None:
        self._model, self._trust_remote_code = model, trust_remote_code
        self._is_adapter = _is_adapter(model)

    @cached_property
    def _architecture(self) -> Architecture:
        with from_extra("hf"):
            return Architecture(self._model, trust_remote_code=self._trust_remote_code)

    def name_tensors(self, view: View) -> tuple[Iterator[tuple[str, torch.Tensor]], bytes | None]:
        """Return the tensors of a view as the model's published files have them, and their config.

        They are compared with the model before. The config is the content of ``config.json`` if it
        differs from the model's, otherwise None.
        """
        metas = {
            name: (torch.Size(shape), dtype)
            for names, shape, dtype in view.list_named()
            for name in names
        }
        if self._is_adapter:
            split = split_adapter(None, self._model / ADAPTER_CONFIG, metas)
            if split.base:
                raise ExportError(
                    f"{min(split.base.values())} is no tensor of an adapter's file; upload "
                    "peft.get_peft_model_state_dict(model), without the base model"
                )
            names = {saved: name for name, saved in split.adapter.items()}
            return ((names[name], tensor) for name, tensor in _iter_names(view)), None
        architecture = self._architecture
        rounded = view.rounded if isinstance(view, VersionView) else set[str]()
        for dtype in {metas[name][1] for name in rounded}:
            if lost := find_kept(rounded, architecture.shell, dtype):
                raise ConfigError(
                    f"{min(lost)} is rounded to {dtype}, and transformers keeps it in float32; "
                    "pass the reader to publish, or open the view with keep_float32"
                )
        tied = {name: names for names, *_ in view.list_named() for name in names}
        naming = architecture.find_naming(
            metas,
            lambda one, other: (
                tied[one] is tied[other] or have_equal_bits(view.read(one), view.read(other))
            ),
            published=view.config if isinstance(view, PublishedView) else None,
        )
        config = naming.config if naming.config != architecture.config else None
        return _iter_model(view, naming), config

    def list_kept(self, dtype: torch.dtype | None) -> list[str]:
        """Return the names of the tensors that a reader with this dtype must not round."""
        if dtype is None or self._is_adapter:
            return []
        shell = self._architecture.shell
        return find_kept(shell.state_dict(), shell, dtype)


def _iter_model(view: View, naming: Naming) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is written of a model, each group once all of its tensors are there."""
    named = [name for names, *_ in view.list_named() for name in names]
    left = Counter(naming.find_group(name) for name in named if name not in naming.dropped)
    groups: dict[str, Tensors] = {}
    for name, tensor in _iter_names(view, naming.dropped):
        group = naming.find_group(name)
        groups.setdefault(group, {})[name] = tensor
        left[group] -= 1
        if not left[group]:
            yield from naming.revert_fusion(groups.pop(group)).items()


def _iter_names(view: View, dropped: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under all of their names but those that are dropped; none share memory."""
    for (names, *_), (_, tensor) in zip(view.list_named(), view.iter_tensors(), strict=True):
        for number, name in enumerate(name for name in names if name not in dropped):
            yield name, tensor.clone() if number else tensor


class WeightFolder:
    """Publishes versions of the weights into a folder, for engines that load models from a disk.

    Usage::

        folder = WeightFolder("weights", model="path/of/the/model")
        with WeightReader(root="ckpts", name="folder") as reader:
            while await reader.wait_newer():
                version = folder.publish(reader)
                post("/update_weights_from_disk", {"model_path": str(version.folder)})

    With an ``adapter_config.json`` in ``model``, the tensors are those of a PEFT adapter, and each
    version is an adapter folder. Names and shapes are compared with the model before anything is
    written; for an adapter, if its config names the folder of its base model. One process publishes
    into a folder.

    Args:
        out: folder of the versions, created if it is missing; or URL of one in an object store,
            such as ``s3://bucket/weights``.
        model: folder with config and tokenizer, which are copied into each version; or with
            ``adapter_config.json``, as ``peft_config.save_pretrained`` writes it.
        deltas: number of versions after a complete one that are published as deltas to the version
            before, for hosts that read them with `FolderReader` or with slime's ``/pull_weights``;
            0 for complete versions only. The process keeps a copy of the weights.
        keep: number of versions that stay, together with those that they build on; ``"all"`` for a
            history, of which `FolderReader.load` returns any version.
        max_shard_bytes: maximum bytes of a file of weights; a larger tensor gets a file of its own.
        trust_remote_code: whether source files of the model may be imported.
        cache: with a URL, local folder of the versions that this process publishes.

    Raises:
        ConfigError: an argument is invalid.
        MissingPackageError: safetensors is not installed.
    """

    def __init__(
        self,
        out: str | Path,
        model: str | Path,
        *,
        deltas: int = 0,
        keep: int | Literal["all"] = 2,
        max_shard_bytes: int = 5_000_000_000,
        trust_remote_code: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        self._bucket, self.out = open_bucket(out, cache)
        self._model = Path(model)
        self._is_adapter = _is_adapter(self._model)
        if not self._is_adapter and not (self._model / "config.json").is_file():
            raise ConfigError(
                f"{model} has neither config.json nor {ADAPTER_CONFIG}; pass the folder of the "
                "model that the engine serves, or of the adapter"
            )
        adapter = (self._model / ADAPTER_CONFIG).read_bytes() if self._is_adapter else b"{}"
        init = str(json.loads(adapter).get("init_lora_weights"))
        if init.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            raise ConfigError(
                f"{model} has init_lora_weights={init!r}, which changed the base model, so engines "
                "that hold the original one would compute something else. Publish the merged model "
                "or the adapter that PEFT's path_initial_model_for_weight_conversion makes"
            )
        if (keep != "all" and keep < 1) or deltas < 0 or max_shard_bytes < 1:
            raise ConfigError(
                f"keep={keep} and max_shard_bytes={max_shard_bytes} must be at least 1 (or "
                f"keep='all'), and deltas={deltas} at least 0"
            )
        if deltas and self._is_adapter:
            raise ConfigError(f"{model} is an adapter, which is published whole; pass deltas=0")
        with from_extra("hf"):
            import safetensors  # noqa: F401
        self._deltas, self._keep, self._max_shard_bytes = deltas, keep, max_shard_bytes
        self._naming = _ViewNaming(self._model, trust_remote_code=trust_remote_code)
        self._last: tuple[PublishedVersion, Tensors] | None = None
        """The version published last and its tensors, from which the next delta is made."""
        self._published: PublishedVersion | None = None
        self._living = ExitStack()
        """Holds the lock that shows that this publisher lives."""

    def publish(self, source: WeightReader | FolderReader | View) -> PublishedVersion:
        """Publish the newest version of a reader, or an open view.

        Args:
            source: a `WeightReader`, a `FolderReader`, or what their ``open`` returned.

        Returns:
            The version that the marker names now, with its folder. If that is this step already,
            its weights are compared, and nothing is written; nor if it is a later step that no run
            has superseded, with a warning.

        Raises:
            WeightSyncError: no version can be read, another process publishes into the folder, or
                the publisher of another job into it lives.
            RemoteError: the object store cannot be written.
            ConfigError: the folder has other weights of this step, so that engines would not load
                these; or ``source`` is a view that rounds what transformers keeps in ``float32``.
            ExportError: the tensors are not those of the model or of the adapter, or transformers
                cannot build the model of the config.
            OSError: the disk is full or broken. The marker names a complete version.
        """
        with ExitStack() as opened:
            if isinstance(source, WeightReader):
                kept = self._naming.list_kept(source.dtype)
                source = opened.enter_context(source.open(keep_float32=kept))
            elif isinstance(source, FolderReader):
                source = opened.enter_context(source.open())
            elif not hasattr(source, "iter_tensors"):
                check_type("source", source, View, "a WeightReader, a FolderReader or a view")
            return self._publish(source)

    def latest(self) -> PublishedVersion | None:
        """Return the version that the marker names; None if nothing was published."""
        return self._bucket.read_latest() if self._bucket else read_latest(self.out)

    def _publish(self, view: View) -> PublishedVersion:
        make_folder(self.out)
        with try_acquire_file_lock(self.out / _LOCK) as acquired:
            if not acquired:
                raise WeightSyncError(
                    f"another process publishes into {self.out}; give each its own folder"
                )
            latest, version = self.latest(), view.version
            self._require_own(version, latest)
            self._remove_leftovers(latest)
            job = str(version.root), version.identity
            if latest and is_run_gone(list_runs(latest.root), latest.run, latest.run_key):
                job = "", ""  # another root has this path now: an older one
            if latest and (latest.root, latest.identity) == job:
                key, known = (version.run, version.step), (latest.run, latest.step)
                if key == known:
                    self._require_same(view, latest)
                    return latest
                # what another folder names is the newest that its publisher has found
                is_newest = key > known or isinstance(view, PublishedView)
                if not is_newest and not is_superseded(latest.root, *known):
                    logger.warning("%s", self._explain_hidden(version, latest, "it comes before"))
                    return latest
            published = self._write(view, latest)
            if latest and published.checksum == latest.checksum:
                what = f"step {published.step} of {published.root}"
                logger.warning("%s is published, but has the weights of step %d", what, latest.step)
            if self._bucket:
                self._bucket.push(published, _encode(published).encode())
            replace_file(self.out / MARKER, _encode(published))
            self._published = published
            if self._bucket or self._keep != "all":
                self._remove_old(published, 1 if self._keep == "all" else self._keep)
            if self._bucket:
                kept = [number for number, _ in iter_version_folders(self.out)]
                if self._keep == "all":  # all but what a publisher left that was killed
                    kept += range(latest.version + 1 if latest else 0)
                try:
                    self._bucket.remove_old(published.version, kept)
                except RemoteError as error:  # a store may take writes and refuse removals
                    logger.warning("older versions stay: %s", error)
            logger.info(
                "published step %d of run %d in %s", version.step, version.run, published.folder
            )
            return published

    def _require_own(self, version: Any, latest: Any) -> None:
        """Require that no living publisher publishes another job, and show that this one lives."""
        self._living.close()
        lock = self._living.enter_context(open_lock_file(self.out / JOB_LOCK))
        is_others = latest and latest != self._published and latest.is_of_other_root(version)
        # a lock in a bucket's cache says nothing of other hosts
        if is_others and ((self._bucket and self._published) or not lock.try_acquire()):
            raise WeightSyncError(
                f"step {version.step} of run {version.run} in {version.root} is not published: "
                f"{latest.folder} is of the job in {latest.root}, whose publisher lives "
                f"({describe_holder(lock.fd, lock.path)}). Give each job its own folder, or end "
                "that publisher"
            )
        lock.acquire(shared=True)

    def _require_same(self, view: View, latest: PublishedVersion) -> None:
        lines = [describe_tensor(*item) for item in self._naming.name_tensors(view)[0]]
        if summarize(lines) != latest.checksum:
            raise self._explain_hidden(view.version, latest, "its weights differ from those of")

    def _explain_hidden(self, version: Any, latest: PublishedVersion, how: str) -> ConfigError:
        return ConfigError(
            f"step {version.step} of run {version.run} in {version.root} is not published: {how} "
            f"step {latest.step} of run {latest.run} in {latest.folder}, which engines keep. "
            "Publish a later step, or into a new folder"
        )

    def _write(self, view: View, latest: PublishedVersion | None) -> PublishedVersion:
        """Write a version under a temporary name, and rename it."""
        version, base_number = view.version, latest.version if latest else 0
        used = self._bucket.list_numbers() if self._bucket else ()
        number = max((base_number, *used)) + 1
        final = version_folder(self.out, number)
        scratch = self.out / f".{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        last, self._last = self._last, None  # a failed version is followed by a complete one
        named, config = self._naming.name_tensors(view)
        try:
            scratch.mkdir()
            tensors = dict(named) if self._deltas else {}
            items = tensors.items() if self._deltas else named
            base = self._find_base(last, latest, tensors)
            if base is None:
                lines = self._write_complete(scratch, items, config)
            else:
                write_delta(scratch, number, base_number, _encode_changes(base, tensors))
                lines = [describe_tensor(*item) for item in items]
            published = PublishedVersion(
                version=number,
                step=version.step,
                run=version.run,
                base=None if base is None else base_number,
                checksum=summarize(lines),
                root=str(version.root),
                identity=version.identity,
                run_key=version.run_key,
                folder=final,
            )
            (scratch / VERSION_FILE).write_text(_encode(published))
            _make_durable(scratch)
            scratch.rename(final)
            sync_folder(self.out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        if self._deltas:
            self._last = published, tensors
        return published

    def _write_complete(
        self, folder: Path, items: Iterable[tuple[str, torch.Tensor]], config: bytes | None
    ) -> list[str]:
        """Write a complete model or adapter into a folder; return the line of each tensor.

        ``config`` replaces the content of the model's ``config.json``. One file of weights is in
        memory at a time, of at most ``max_shard_bytes`` unless one tensor is larger; an adapter has
        one file.
        """
        lines: list[str] = []
        dtypes: Counter[torch.dtype] = Counter()
        weight_map: dict[str, int] = {}
        parts = total = size = 0
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in items:
            is_full = pending and size + tensor.nbytes > self._max_shard_bytes
            if is_full and not self._is_adapter:
                save_tensors(folder / f"{parts}.part", pending)
                parts, size, pending = parts + 1, 0, {}
            pending[name] = tensor.contiguous()
            weight_map[name] = parts
            size, total = size + tensor.nbytes, total + tensor.nbytes
            lines.append(describe_tensor(name, tensor))
            if tensor.is_floating_point():
                dtypes[tensor.dtype] += tensor.numel()
        save_tensors(folder / f"{parts}.part", pending)
        names = [ADAPTER_FILE if self._is_adapter else "model.safetensors"]
        if parts:
            count = parts + 1
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: names[part] for name, part in weight_map.items()},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for part, name in enumerate(names):
            (folder / f"{part}.part").rename(folder / name)
        _copy_small_files(self._model, folder, dtypes, config)
        return lines

    def _find_base(
        self, last: tuple[PublishedVersion, Tensors] | None, latest: Any, tensors: Tensors
    ) -> Tensors | None:
        """Return the tensors that a delta may build on; None if the version has to be complete."""
        if not last or last[0] != latest:
            return None
        if not 0 < len(self._find_chain(latest.version)) <= self._deltas:
            return None
        if _describe_structure(last[1]) != _describe_structure(tensors):
            return None
        return last[1]

    def _remove_leftovers(self, latest: PublishedVersion | None) -> None:
        """Remove what a publisher left that was killed before it replaced the marker."""
        for path in self.out.glob(f".weight_v*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)
        known = latest.version if latest else 0
        for path in [path for number, path in iter_version_folders(self.out) if number > known]:
            if not (path / VERSION_FILE).exists():
                raise ConfigError(f"{path} was not published by trinity_sync; choose another one")
            remove_version(path)

    def _remove_old(self, published: PublishedVersion, keep: int) -> None:
        """Remove versions beyond ``keep``, except those that a kept version builds on."""
        kept = {published.version}
        newest_first = sorted(iter_version_folders(self.out), reverse=True)
        for number, _ in newest_first[:keep]:
            kept |= self._find_chain(number)
        for number, path in newest_first:  # so a delta is removed before its base
            if number not in kept:
                remove_version(path)

    def _find_chain(self, number: int) -> set[int]:
        """Return a version and those that it builds on; none if one of them cannot be read."""
        with suppress(WeightSyncError):
            return {each.version for each in list_chain(self.out, read_version(self.out, number))}
        return set()


def _encode_changes(old: Tensors, new: Tensors) -> dict[str, Change]:
    changes = {
        name: encode_change(view_bytes(old[name]), view_bytes(tensor))
        for name, tensor in new.items()
    }
    return {name: change for name, change in changes.items() if change.content}


def _describe_structure(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _encode(published: PublishedVersion) -> str:
    values = {f.name: getattr(published, f.name) for f in fields(VersionRecord)}
    return encode_record(VersionRecord(**values), indent=1)
