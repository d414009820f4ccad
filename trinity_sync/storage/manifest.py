"""``global_step_N/manifest.json``: the files of a step. Its atomic appearance is the commit.

The files of a step with thousands are in parts of the manifest. A rank that waits for its commit
looks at its own files only. With one file for all ranks, each of 4,096 ranks would read, and check,
the 4 MB of the others. So a manifest with more than `PART_FILES` files names parts, with their
digests, and each part has the files of consecutive ranks. The parts are durable before the manifest
is renamed, which stays the commit. They are named by their content, so those of an earlier manifest
of the step stay readable until it is replaced.

The record of a file also has what was found in its values as it was written (`tensors.health`), and
since which step its bytes are the same. A step is unhealthy if values of it are not finite; a part
that has not changed is an alarm, and as good to load as it was.
"""

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from trinity_sync.errors import FormatError, ManifestError, TrinitySyncError
from trinity_sync.fs.atomic import is_temporary, list_paths, read_uncached, replace_file
from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    MANIFEST_FORMAT,
    Kind,
    is_below,
    shard_file,
    step_folder,
)
from trinity_sync.snapshot.identity import Export, Parent, read_identity
from trinity_sync.storage.placement import describe_ranks
from trinity_sync.storage.runs import find_run_of
from trinity_sync.storage.save_timing import SaveTiming

logger = logging.getLogger(__name__)

PART_FILES = 1000
"""Most files in a manifest without parts, and in a part."""
RESUME_ONLY = ("optim", "extra_state")
"""Components without which the weights of a step can still be read."""
COMPARED = ("model", "optim", "dcp")
"""Components that a training changes from step to step."""
EXPORTED = "hf_model"
"""Component of the files of an exported model."""
DISTCP = ".distcp"
"""Suffix of a rank's file of DCP or Megatron, which only they read."""
_NAMED = 3
"""Tensors that a message names."""
_NAME = re.compile(r"manifest-[0-9a-f]{16}\.json")
_OWN = (MANIFEST, FULL_CHECKPOINT_MARK, CORRUPTION_MARK)
_REMOVED = re.compile(r"\.nfs[0-9a-f]{24}")
_Magnitude = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class FileHealth:
    """The floating-point values of a file."""

    tensors: Count
    """Number of tensors that were looked at."""
    nonfinite: Count
    """Number of values that are NaN or infinite."""
    norm: _Magnitude
    """L2 norm of the finite values; of tensors of more than 512 KiB, it is estimated."""
    largest: _Magnitude
    """Largest magnitude of the finite values."""
    names: tuple[str, ...]
    """The first tensors with values that are not finite; in a file of DCP, where they start."""


@dataclass(frozen=True)
class ComponentHealth(FileHealth):
    """The values of a component of a role, of all ranks whose files were looked at."""

    role: str
    """Folder below the step's folder."""
    component: str
    """``model``, ``optim`` or ``dcp``."""
    nonfinite_ranks: tuple[int, ...]
    """Ranks with values that are not finite."""
    unchanged_since: int | None
    """Earlier step whose files have the same content on all ranks; None if a file has changed."""

    @property
    def wrong(self) -> str:
        """Which values are not finite, in words; empty if all are finite."""
        if not self.nonfinite:
            return ""
        values = f"{self.nonfinite:,} non-finite value{'s' * (self.nonfinite > 1)}"
        ranks, names = describe_ranks(self.nonfinite_ranks), ", ".join(self.names)
        return f"{values} in {self.role}/{self.component} of {ranks} ({names})"

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        since = self.unchanged_since
        is_same = f"{self.role}/{self.component} has not changed since step {since}"
        return [*filter(None, [self.wrong, is_same * (since is not None)])]


def sum_up_health(files: "Iterable[FileRecord]") -> tuple[ComponentHealth, ...]:
    """Return the health of each component of each role, as far as anything is known of it."""
    groups: dict[tuple[str, str], list[FileRecord]] = {}
    for file in files:
        if file.component in COMPARED:
            groups.setdefault((file.role, file.component), []).append(file)
    found = (_sum_up(*group, files) for group, files in sorted(groups.items()))
    return tuple(each for each in found if each.tensors or each.problems)


def _sum_up(role: str, component: str, files: "Sequence[FileRecord]") -> ComponentHealth:
    seen = [file.health for file in files if file.health]
    since = [-1 if file.unchanged_since is None else file.unchanged_since for file in files]
    return ComponentHealth(
        sum(each.tensors for each in seen),
        sum(each.nonfinite for each in seen),
        hypot(*(each.norm for each in seen)),
        max((each.largest for each in seen), default=0.0),
        tuple(dict.fromkeys(name for each in seen for name in each.names))[:_NAMED],
        role,
        component,
        tuple(file.rank for file in files if file.health and file.health.nonfinite),
        unchanged_since=None if -1 in since else max(since),
    )


def is_own_file(path: str) -> bool:
    """Return whether a file below a step's folder is part of no save: trinity_sync manages it.

    ``path`` is below that folder, with ``/``. The manifest, its parts and the marks are at the top
    of the folder; a file of that name further down is a user's. Temporary files, and what NFS keeps
    of removed files, are anywhere.
    """
    name = path.rpartition("/")[2]
    passing = is_temporary(name) or _REMOVED.fullmatch(name)
    return bool(passing or path in _OWN or _NAME.fullmatch(path))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a committed step."""

    path: str
    """Path below the step's folder, with ``/``."""
    nbytes: Count
    digest: str
    role: str = ""
    component: str = ""
    rank: Count = 0
    world_size: Count = 0
    images: tuple[str, ...] = ()
    """Random names of the images that were committed as this file, as in their tickets: several
    where a state was submitted again, none for the files of a save function."""
    health: FileHealth | None = None
    """Its values; None if it is not looked into."""
    unchanged_since: Count | None = None
    """Earlier committed step whose file had the same content, or the step since which it has; None
    if it has changed, or nobody asked."""

    def merge(self, later: "FileRecord | None") -> "FileRecord":
        """Return the record after a later commit, whose record is None if it lacks the path.

        It has the images of both commits, and what is known of the values, if the content is the
        same, otherwise the later ones.
        """
        if later is None:
            return self
        if self.digest != later.digest:
            return later
        images = tuple(dict.fromkeys((*self.images, *later.images)))
        health, since = self.health or later.health, self.unchanged_since
        return replace(later, images=images, health=health, unchanged_since=since)

    @property
    def is_shard(self) -> bool:
        """Whether the file is the shard of one rank, rather than one of several small files."""
        name = shard_file(self.component, self.world_size, self.rank)
        return PurePosixPath(self.path).name == name

    @property
    def is_distcp(self) -> bool:
        """Whether the file is one rank's of DCP or Megatron, which only they read."""
        return self.path.endswith(DISTCP)

    @property
    def is_weights(self) -> bool:
        """Whether the file has weights, in a format that readers and exports understand."""
        return self.component == "model" and not self.is_distcp


@dataclass(frozen=True)
class ManifestPart:
    """What a manifest says of one of its parts."""

    name: str
    """Name of the part's file in the step's folder: ``manifest-<start of its digest>.json``."""
    digest: str
    """SHA-256 of the part's file."""
    first_rank: Count
    last_rank: Count
    roles: tuple[str, ...]
    nbytes: Count
    """Total bytes of the files in the part."""


@dataclass(frozen=True)
class _Part(Record):
    """Content of a part."""

    run: Count
    step: Count
    files: tuple[FileRecord, ...]


def _write_part(folder: Path, run: int, step: int, files: Sequence[FileRecord]) -> ManifestPart:
    content = encode_record(_Part(run, step, tuple(files))).encode()
    digest = hashlib.sha256(content).hexdigest()
    part = ManifestPart(
        name=f"manifest-{digest[:16]}.json",
        digest=digest,
        first_rank=files[0].rank,
        last_rank=files[-1].rank,
        roles=tuple(sorted({record.role for record in files if record.role})),
        nbytes=sum(record.nbytes for record in files),
    )
    replace_file(folder / part.name, content)
    return part


def _read_part(folder: Path, part: ManifestPart) -> tuple[FileRecord, ...]:
    """Return the files in a part of a manifest.

    Raises:
        ValueError: the part is torn or was altered.
        FileNotFoundError: it is missing.
    """
    if not _NAME.fullmatch(part.name):
        raise ValueError(f"its part {part.name} is not a part's name")
    content = read_uncached(folder / part.name)
    if hashlib.sha256(content).hexdigest() != part.digest:
        raise ValueError(f"its part {part.name} differs from its digest")
    return decode_record(_Part, content, folder / part.name).files


@dataclass(frozen=True)
class CallableRecord:
    """A save by a user's callable, as the manifest lists it."""

    name: str
    rank: Count
    seconds: Seconds
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest(Record, format=MANIFEST_FORMAT):
    """The content of a committed step."""

    job: str
    run: Count
    step: Count
    kinds: tuple[Kind, ...]
    files: tuple[FileRecord, ...]
    callables: tuple[CallableRecord, ...]
    committed_at: Seconds
    """Time of the newest commit of the step, in seconds since the epoch."""
    timings: tuple[SaveTiming, ...] = ()
    """One for each save of the step: a sync and the checkpoint that follows it are two. None for a
    step that was imported."""
    checkpoint_run: Count = 0
    """Earlier run whose checkpoint a sync of ``run`` left in place, until ``run`` saves its own; 0
    if ``run`` has committed all kinds itself."""
    parts: tuple[ManifestPart, ...] = ()
    """Parts of which ``files`` has some ranks' files only; none if ``files`` has all."""
    exports: dict[str, Export] = field(default_factory=dict)
    """Roles whose model the step's saves requested to export into it once it is committed, and how.
    So a crash between the commit and an export loses none. The step counts as committed without."""
    failed_exports: tuple[str, ...] = ()
    """Roles whose export has failed: it no longer keeps the step, and a retry may run it again."""
    keep: Count = 0
    """Most checkpoints that a process of the step's saves wants to keep after it; 0 for all."""
    run_key: str = ""
    """Key of ``run``; empty for a step that was imported."""
    removed: tuple[str, ...] = ()
    """Components that retention has removed from a checkpoint, of which the weights are left."""
    parents: tuple[Parent, ...] = ()
    """Steps whose weights were merged into this one; none if a training saved it."""

    @property
    def is_reduced(self) -> bool:
        """Whether it has weights of checkpoints that no later sync supersedes, and is none."""
        return bool(self.removed or self.parents)

    @property
    def weights_digest(self) -> str:
        """SHA-256 of the names and digests of its weights: exports and retention leave it as it is.

        A manifest with parts has to have the files of all ranks.
        """
        weights = [f"{f.path} {f.digest}\n" for f in self.files if f.component in ("model", "dcp")]
        return hashlib.sha256("".join(sorted(weights)).encode()).hexdigest()

    def as_parent(self, root: str | Path, weight: float = 1.0) -> Parent:
        """Return the step as what another one is made from; ``files`` has those of all ranks."""
        path, job = str(Path(root).resolve()), read_identity(root)
        return Parent(path, job, self.run, self.step, self.weights_digest, weight)

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(each.nbytes for each in self.parts or self.files)

    @cached_property
    def health(self) -> tuple[ComponentHealth, ...]:
        """Values of ``files`` by role and component."""
        return sum_up_health(self.files)

    @property
    def nonfinite(self) -> str:
        """Which values are not finite, in words; empty for a healthy step."""
        return "; ".join(each.wrong for each in self.health if each.wrong)

    @property
    def alarms(self) -> list[str]:
        """All that is wrong with the values, in words."""
        return [problem for each in self.health for problem in each.problems]

    @cached_property
    def images(self) -> frozenset[str]:
        """Names of the images that were committed as ``files``."""
        return frozenset(image for record in self.files for image in record.images)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles that have a file in this step, sorted."""
        found = {record.role for record in self.files}.union(*(part.roles for part in self.parts))
        return tuple(sorted(found - {""}))

    def serves(self, kind: Kind) -> bool:
        """Return whether the step has ``kind``, also where ``run`` has left an earlier run's."""
        return kind in self.kinds

    def has_kind(self, kind: Kind, roles: Iterable[str] = (), run: int | None = None) -> bool:
        """Return whether ``run`` or a later one has committed ``kind``, with files of ``roles``.

        The run is that of the manifest by default. Each role may be synced by itself.
        """
        since = self.run if run is None else run
        is_of_run = self.serves(kind) and find_run_of(self, kind) >= since
        return is_of_run and {*roles} <= {*self.roles}

    def list_lost(self, kinds: Iterable[Kind]) -> list[Kind]:
        """Return the kinds that a step with other ``kinds`` in the place of this one would lack."""
        return sorted({*self.kinds}.difference(kinds))

    def list_components(self, role: str) -> set[str]:
        """Return the components of a role that `load_shards` reads."""
        return {
            record.component for record in self.files if record.role == role and record.is_shard
        }

    def keep_weights(self) -> "Manifest":
        """Return the manifest without what a resume alone needs; itself without weights."""
        gone = {
            f.path: f.component for f in self.files if f.component in RESUME_ONLY and f.is_shard
        }
        if not gone or not any(record.is_weights for record in self.files):
            return self
        files = tuple(record for record in self.files if record.path not in gone)
        lost = tuple(sorted({*gone.values()}))
        return replace(self, kinds=("state_dict",), checkpoint_run=0, files=files, removed=lost)

    def is_exported(self, role: str) -> bool:
        """Return whether the step contains the exported model of a role."""
        return any((each.role, each.component) == (role, EXPORTED) for each in self.files)

    def list_missing_exports(self) -> list[str]:
        """Return the roles whose requested model is not part of the step, which has all its files.

        Their export may have failed.
        """
        return [role for role in self.exports if not self.is_exported(role)]

    def find_file(self, path: str) -> FileRecord | None:
        """Return the record of the file at ``path``, or None."""
        return next((record for record in self.files if record.path == path), None)

    def hint_at_format(self, role: str) -> str:
        """Return a part of a message: who reads a role that has no shards of ``torch.save``."""
        saved = {r.component for r in self.files if r.role == role and r.is_distcp}
        if "dcp" in saved:
            return "it was saved by dcp.async_save, load it by dcp.load with a StepReader; "
        if saved:
            return (
                "it was saved by Megatron, load it by MegatronCheckpointManager, or make a Hugging "
                "Face model of it: python -m verl.model_merger; "
            )
        return ""

    def merge(self, later: "Manifest") -> "Manifest":
        """Return the manifest of this and a later commit of the step, such as its checkpoint."""
        theirs = {record.path: record for record in later.files}
        names = {(each.name, each.rank) for each in later.callables}
        saves = {(each.kind, each.roles) for each in self.timings}
        # what an earlier run could not export, this one does not try
        failed = () if self.run == later.run else self.failed_exports
        exports = {role: how for role, how in self.exports.items() if role not in failed}
        return replace(
            later,
            kinds=tuple(sorted({*self.kinds, *later.kinds})),
            checkpoint_run=(later if "checkpoint" in later.kinds else self).checkpoint_run,
            files=_by_path(
                [*(f.merge(theirs.pop(f.path, None)) for f in self.files), *theirs.values()]
            ),
            callables=(
                *(each for each in self.callables if (each.name, each.rank) not in names),
                *later.callables,
            ),
            removed=() if later.serves("checkpoint") else self.removed,
            exports={**exports, **later.exports},
            keep=max(self.keep, later.keep),
            failed_exports=tuple(
                sorted({*self.failed_exports, *later.failed_exports}.difference(failed))
            ),
            # a save that is retried after its commit keeps its timing
            timings=(
                *self.timings,
                *(each for each in later.timings if (each.kind, each.roles) not in saves),
            ),
        )


def write_manifest(root: str | Path, manifest: Manifest) -> None:
    """Commit a step: write its manifest into its folder, atomically and durably."""
    write_manifest_into(step_folder(root, manifest.step), manifest)


def write_manifest_into(folder: Path, manifest: Manifest) -> None:
    """Write a manifest into a folder that is to become a step's, atomically and durably."""
    assert not manifest.parts, "files of other ranks would be lost"
    files, parts = _by_path(manifest.files), tuple[ManifestPart, ...]()
    if len(files) > PART_FILES:
        by_rank = sorted(files, key=lambda record: record.rank)
        cuts = [by_rank[cut : cut + PART_FILES] for cut in range(0, len(files), PART_FILES)]
        files = ()
        parts = tuple(_write_part(folder, manifest.run, manifest.step, cut) for cut in cuts)
    content = encode_manifest(replace(manifest, files=files, parts=parts))
    replace_file(folder / MANIFEST, content, mode=0o644)  # what it requests is this user's alone
    _remove_other_parts(folder, parts)


def finish_manifest(root: str | Path, step: int) -> None:
    """Remove what a process left that died after it wrote the manifest of a step."""
    if manifest := read_manifest(root, step, ranks=()):
        _remove_other_parts(step_folder(root, step), manifest.parts)


def _remove_other_parts(folder: Path, parts: Sequence[ManifestPart]) -> None:
    """Remove the parts in a step's folder that are not among ``parts``, which its manifest names.

    Also what writers of manifests that died have left. Call it under the commit lock.
    """
    named = {part.name for part in parts}
    try:
        for path in list_paths(folder, "*manifest*"):
            is_part = _NAME.fullmatch(path.name) and path.name not in named
            if is_part or (path.name.startswith(".manifest") and is_temporary(path.name)):
                path.unlink(missing_ok=True)
    except OSError as error:  # they take space until the step is removed
        logger.warning("cannot remove parts of an earlier manifest in %s: %s", folder, error)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest's file. Remotes store one with all files."""
    # indenting takes ten times as long, and a list of thousands of files is not read by people
    indent = 1 if len(manifest.files) <= PART_FILES else None
    return encode_record(manifest, indent=indent).encode()


def read_manifest(
    root: str | Path, step: int, *, ranks: Collection[int] | None = None
) -> Manifest | None:
    """Return the manifest of a step, or None if the step is not committed.

    With ``ranks``, the ``files`` of a manifest with parts are at least those of these ranks, and
    such a manifest is not to be written.

    Raises:
        ManifestError: the manifest is torn or was altered.
        FormatError: another release has written it.
    """
    folder = step_folder(root, step)
    while True:
        content = _read(folder / MANIFEST)
        if content is None:
            return None
        manifest = parse_manifest(content, folder / MANIFEST, step)
        try:
            return _add_files(manifest, folder, ranks)
        except FileNotFoundError as error:
            if _read(folder / MANIFEST) == content:
                raise _bad(folder / MANIFEST, f"lacks its part {error.filename}") from error
            # it was replaced meanwhile, and its parts were removed


def _add_files(manifest: Manifest, folder: Path, ranks: Collection[int] | None) -> Manifest:
    if not manifest.parts:
        return manifest
    files: list[FileRecord] = []
    try:
        for part in manifest.parts:
            if ranks is None or any(part.first_rank <= r <= part.last_rank for r in ranks):
                files += _read_part(folder, part)
    except ValueError as error:
        raise _bad(folder / MANIFEST, f"is torn or edited ({error})") from error
    _require_below(files, folder / MANIFEST)
    return replace(manifest, files=_by_path(files), parts=() if ranks is None else manifest.parts)


def _read(path: Path) -> bytes | None:
    try:
        return read_uncached(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise _bad(path, "is not a regular file") from error


def parse_manifest(content: bytes, path: Path | str, step: int) -> Manifest:
    """Return the manifest encoded in the bytes of a file, without the files in its parts.

    ``path`` is for messages; ``step`` is that of the folder which contains the file.

    Raises:
        ManifestError: the manifest is torn or was altered.
        FormatError: another release has written it.
    """
    try:
        manifest = decode_record(Manifest, content, path)
    except ValueError as error:
        raise _bad(path, f"is torn or edited ({error})") from error
    if manifest.step != step:
        raise _bad(path, f"is the manifest of step {manifest.step}")
    _require_below(manifest.files, path, [n for each in manifest.callables for n in each.files])
    return manifest


def _require_below(
    files: Sequence[FileRecord], manifest: Path | str, others: Sequence[str] = ()
) -> None:
    named = [*others, *(record.path for record in files)]
    named += {record.role for record in files if record.role}
    if not all(map(is_below, named)):
        raise _bad(manifest, "names a file outside of the step's folder")


def is_parent_there(parent: Parent) -> bool:
    """Return whether a root has a step now, with the weights that it had."""
    with suppress(OSError, TrinitySyncError):
        now = read_manifest(parent.root, parent.step)
        return now is not None and now.as_parent(parent.root, parent.weight) == parent
    return False


def read_run_number(root: str | Path, step: int) -> int:
    """Return the number of the run that committed a step.

    It is 0 if no run did, as for a checkpoint of another system. The manifest may be another
    release's: a commit next to it still updates the latest pointers.
    """
    try:
        manifest = read_manifest(root, step, ranks=())
    except ManifestError:
        return 0
    except FormatError as error:
        return error.run or 0
    return manifest.run if manifest else 0


def read_run_manifest(
    root: str | Path, run: int, step: int, *, ranks: Collection[int] | None = None
) -> Manifest | None:
    """Return what a run has committed of a step; ``ranks`` are as in `read_manifest`.

    It is None if the run has committed nothing, or the manifest is torn.

    Raises:
        FormatError: another release has committed the step.
    """
    with suppress(ManifestError):
        manifest = read_manifest(root, step, ranks=ranks)
        return manifest if manifest and manifest.run == run else None
    return None


def read_run_head(root: str | Path, run: int, step: int) -> Manifest | None:
    """Do as `read_run_manifest` without the parts and their files; None if it cannot be read."""
    with suppress(OSError):
        return read_run_manifest(root, run, step, ranks=())
    return None


def group_equal(records: Iterable[FileRecord]) -> list[list[FileRecord]]:
    """Return records in groups of those whose files have the same bytes."""
    groups: dict[str, list[FileRecord]] = defaultdict(list)
    for record in records:
        groups[record.digest].append(record)
    return [*groups.values()]


def _by_path(records: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    return tuple(sorted(records, key=lambda record: record.path))


def _bad(path: Path | str, why: str) -> ManifestError:
    return ManifestError(
        f"manifest {path} {why}; the step does not count as committed. Restore the manifest from "
        "a copy, or remove the step's folder."
    )
