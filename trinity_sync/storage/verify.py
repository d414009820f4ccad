"""Verification: read committed files again and compare them with their manifests.

Reading takes no lock but a lease. The result is recorded under the commit lock: a corrupted step
gets a mark (``corruption``), and the latest pointers move back to the newest step that can be
loaded. A crash between the two leaves a pointer at a marked step, which nothing loads, and which
the next verification or reconcile moves. A step that is valid again loses its mark the same way.
"""

import errno
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trinity_sync.errors import CommitError, ConfigError, FormatError, ManifestError
from trinity_sync.fs.atomic import UNWRITABLE
from trinity_sync.fs.direct_io import OnProgress, digest_file, no_progress
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.fs.process import lower_thread_priority
from trinity_sync.layout import CORRUPTION_MARK, KINDS, step_folder, steps_on_disk
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.discovery import (
    Corruption,
    iter_committed_steps,
    list_unnamed_files,
    mark_corrupted,
    read_corruption,
    remove_mark,
    repair_latest_pointer,
)
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest
from trinity_sync.storage.steps_in_use import lease_to_read

logger = logging.getLogger(__name__)

BROKEN = {errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN}
"""Error numbers for a file whose bytes are lost; others are problems of the reader."""


@dataclass(frozen=True)
class ChosenFile:
    """A file to read."""

    root: str
    step: int
    run: int
    record: FileRecord


@dataclass(frozen=True)
class CheckedFile:
    """A file that was read."""

    file: ChosenFile
    wrong: str
    """Reason why it is corrupted, worded to follow its path; empty if it is valid."""
    seconds: float


@dataclass(frozen=True)
class VerifiedStep:
    """Result of the verification of a step."""

    root: str
    step: int
    state: Literal["valid", "corrupted", "restored", "replaced"]
    """``restored``: it was marked as corrupted and is valid again; ``replaced``: another commit
    replaced it, or it was removed meanwhile."""
    files: int
    nbytes: int
    seconds: float
    """Seconds of reading, summed over its files."""
    wrong: str = ""
    """Why it is corrupted; of a valid step, the files in its folder that its commit lacks."""


def choose_files(
    root: str | Path,
    *,
    step: int | None = None,
    newest: int = 0,
    sample: int | float = 0,
    seed: int = 0,
) -> list[ChosenFile]:
    """Return the files to read: of ``step``, of the ``newest`` steps, and a ``sample`` of all.

    The sample has about this number of bytes, or share of them if it is a float, and at least one
    file. All files lie on a circle in a fixed order, and each seed selects the next arc of it: with
    the day's number as seed, every file is selected in turn.

    Raises:
        CommitError: ``step`` is not committed.
        FormatError: another release has made the root or committed a step.
    """
    read_identity(root)  # which refuses a root of another release
    if step is not None and read_manifest(root, step) is None:
        raise CommitError(
            f"step {step} in {root} is not committed, so there is nothing to compare its files "
            "with (trinity-sync ls lists the committed steps)"
        )
    manifests = list(iter_committed_steps(root))
    by_age = sorted(manifests, key=lambda manifest: (manifest.run, manifest.step))
    complete = {manifest.step for manifest in by_age[len(by_age) - min(newest, len(by_age)) :]}
    if step is not None:
        complete.add(step)
    where = str(Path(root).resolve())
    files = [ChosenFile(where, m.step, m.run, record) for m in manifests for record in m.files]
    if isinstance(sample, float):
        sample = math.ceil(sample * sum(file.record.nbytes for file in files))
    chosen = set(_select_arc(files, sample, seed)) if sample else set()
    return [file for file in files if file.step in complete or file in chosen]


def judge_manifests(root: str | Path, step: int | None = None) -> list[VerifiedStep]:
    """Return the steps, or ``step`` alone, whose manifest is torn or was altered.

    They are corrupted, and have no files that can be chosen. Raises as `choose_files`.
    """
    found = []
    for each in steps_on_disk(root) if step is None else [step]:
        try:
            read_manifest(root, each)
        except ManifestError as error:
            where = str(Path(root).resolve())
            found.append(VerifiedStep(where, each, "corrupted", 0, 0, 0.0, str(error)))
    return found


def split_evenly(files: Sequence[ChosenFile], number: int) -> list[list[ChosenFile]]:
    """Return the files in lists of about the same total size, without empty lists."""
    lists: list[list[ChosenFile]] = [[] for _ in range(number)]
    sizes = [0] * number
    for file in sorted(files, key=lambda file: -file.record.nbytes):
        least = sizes.index(min(sizes))
        lists[least].append(file)
        sizes[least] += file.record.nbytes
    return [files for files in lists if files]


def check_files(
    files: Sequence[ChosenFile], *, nice: int = 0, on_progress: OnProgress = no_progress
) -> list[CheckedFile]:
    """Read files, past the page cache, and compare them with their manifests.

    ``nice`` is the niceness of the reading thread, as in nice(1).

    Raises:
        ConfigError: the root is missing, or this process may not read it, which says nothing about
            the files.
    """
    found = []
    total = sum(file.record.nbytes for file in files)
    steps: dict[tuple[str, int], list[ChosenFile]] = {}
    for file in files:
        steps.setdefault((file.root, file.step), []).append(file)
    with ThreadPoolExecutor(1, "verify", initializer=partial(lower_thread_priority, nice)) as pool:
        for (root, step), of_step in steps.items():
            if not Path(root).is_dir():
                raise ConfigError(f"{root} does not exist; check that it is mounted on this node")
            with ExitStack() as leased:
                with suppress(CommitError, FormatError, OSError):  # a corrupted step has no lease
                    leased.enter_context(lease_to_read(root, step, "verify"))
                for file in of_step:
                    start = time.perf_counter()
                    wrong = pool.submit(
                        _find_corruption, file, lambda n: on_progress(n, total)
                    ).result()
                    found.append(CheckedFile(file, wrong, time.perf_counter() - start))
    return found


def judge_steps(checked: Sequence[CheckedFile]) -> list[VerifiedStep]:
    """Mark corrupted steps, remove the marks of valid ones, and repair the latest pointers.

    Steps that have a corrupted file under another name are corrupted as well.

    Raises:
        OSError: the root cannot be written, so no step can be marked.
    """
    steps: dict[tuple[str, int], list[CheckedFile]] = {}
    for each in (*checked, *_list_other_names(checked)):
        steps.setdefault((each.file.root, each.file.step), []).append(each)
    return [_judge_step(root, step, steps[root, step]) for root, step in sorted(steps)]


def _judge_step(root: str, step: int, checked: list[CheckedFile]) -> VerifiedStep:
    result = partial(
        VerifiedStep,
        root=root,
        step=step,
        files=len(checked),
        nbytes=sum(each.file.record.nbytes for each in checked),
        seconds=sum(each.seconds for each in checked),
    )
    manifest, before = _manifest(root, step), read_corruption(root, step)
    is_clean = manifest is not None and not list_unnamed_files(root, manifest)
    if is_clean and before is None and not any(each.wrong for each in checked):
        return result(state="valid")
    with ExitStack() as held:
        try:
            held.enter_context(acquire_commit_lock(root))
            is_writable = True
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            is_writable = False
        manifest, before = _manifest(root, step), read_corruption(root, step)
        if manifest is None or any(_is_stale(each.file, manifest) for each in checked):
            return result(state="replaced")
        seen = {each.file.record.path: each.wrong for each in checked}
        known = before.files if before else {}
        unseen = {record.path for record in manifest.files} - seen.keys()
        unseen |= {CORRUPTION_MARK} if unseen else set()  # one that is torn may be of any file
        old = {name: wrong for name, wrong in known.items() if name in unseen}
        wrong = {**old, **{name: what for name, what in seen.items() if what}}
        corruption = Corruption(wrong, time.time())
        if not is_writable:
            logger.warning("%s cannot be written: step %d keeps the mark that it has", root, step)
        elif wrong:
            mark_corrupted(root, step, corruption)
        else:
            remove_mark(step_folder(root, step))
        for kind in KINDS if is_writable else ():
            repair_latest_pointer(root, kind)
        unnamed = list_unnamed_files(root, manifest)
    if wrong:
        return result(state="corrupted", wrong=str(corruption))
    what = f"the commit does not contain {', '.join(unnamed)}" if unnamed else ""
    return result(state="restored" if before and is_writable else "valid", wrong=what)


def _list_other_names(checked: Sequence[CheckedFile]) -> Iterator[CheckedFile]:
    """Yield the corrupted files under the names that unchanged ones have in other steps."""
    for bad in (each for each in checked if each.wrong):
        root, record = Path(bad.file.root), bad.file.record
        path = step_folder(root, bad.file.step) / record.path
        with suppress(OSError):  # it is missing, and may be there under its other names
            for manifest in iter_committed_steps(root) if path.stat().st_nlink > 1 else ():
                for same in (each for each in manifest.files if each.digest == record.digest):
                    name = step_folder(root, manifest.step) / same.path
                    if name != path and name.exists() and name.samefile(path):
                        file = ChosenFile(bad.file.root, manifest.step, manifest.run, same)
                        yield CheckedFile(file, bad.wrong, 0.0)


def _find_corruption(
    file: ChosenFile, on_read: Callable[[int], object], *, is_again: bool = False
) -> str:
    folder = step_folder(file.root, file.step)
    path, seen = folder / file.record.path, 0

    def count(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        on_read(nbytes)

    if not path.resolve().is_relative_to(folder.resolve()):
        return "is outside of the step's folder"
    try:
        found = path.stat().st_size
        if found != file.record.nbytes:
            return f"has {found:,} bytes instead of {file.record.nbytes:,}"
        digest = digest_file(path, found, count)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno not in BROKEN:
            raise ConfigError(
                f"{path} cannot be read here ({error.strerror}), which says nothing about the "
                "file; repair that and verify again"
            ) from error
        if is_again:
            return f"cannot be read ({error.strerror})"
        on_read(-seen)
        return _find_corruption(file, on_read, is_again=True)  # its disk may have been away
    if digest != file.record.digest:
        return f"has digest {digest} instead of {file.record.digest}"
    return ""


def _manifest(root: str, step: int) -> Manifest | None:
    try:
        return read_manifest(root, step)
    except (ManifestError, FormatError):
        return None


def _is_stale(file: ChosenFile, manifest: Manifest) -> bool:
    return file.run != manifest.run or file.record != manifest.find_file(file.record.path)


def _select_arc(files: Sequence[ChosenFile], nbytes: int, seed: int) -> Iterator[ChosenFile]:
    """Yield the files that begin in the seed's arc; if there is none, the file around it."""
    around = sorted(files, key=_hash_place)
    total = sum(file.record.nbytes for file in around)
    if not total:
        return
    begin, taken, at = seed * nbytes % total, False, 0
    containing = around[0]
    for file in around:
        if (at - begin) % total < nbytes:
            taken = True
            yield file
        if at <= begin:
            containing = file
        at += file.record.nbytes
    if not taken:
        yield containing


def _hash_place(file: ChosenFile) -> bytes:
    return hashlib.sha256(f"{file.run}/{file.step}/{file.record.path}".encode()).digest()
