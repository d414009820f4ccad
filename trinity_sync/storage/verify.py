"""Read what was committed again, and see that it is what the manifests say.

A disk loses bytes without a word. Whoever finds out at the moment of a restore has lost the step;
whoever reads steps while newer ones are made can still fall back to a good one, or fetch a copy.

Reading takes no lock but a lease. What it found is judged under the commit lock: the step is marked
beside its files (``corruption``), and the iteration files move back to the newest step that can be
loaded. A crash between the two leaves a pointer at a marked step, which nobody loads, and which
the next judgement, or reconcile, moves. A step that is valid again loses its mark in the same way.
"""

import errno
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trinity_sync.errors import CommitError, ConfigError, FormatError, ManifestError
from trinity_sync.fs.direct_io import digest_file
from trinity_sync.fs.locks import one_change_at_a_time
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import KINDS, step_folder
from trinity_sync.storage.corruption import (
    Corruption,
    mark_corrupted,
    read_corruption,
    remove_mark,
    require_own_release,
)
from trinity_sync.storage.discovery import committed_steps
from trinity_sync.storage.latest_pointer import repair_latest_pointer
from trinity_sync.storage.leases import LONG_LEASE_S, acquire_lease
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest
from trinity_sync.storage.persist import yield_to_others

BROKEN = {errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN}
"""What the kernel says of a file whose bytes are lost; all else is the reader's own trouble."""


@dataclass(frozen=True)
class ChosenFile:
    """One file that is to be read."""

    root: str
    step: int
    run: int
    record: FileRecord


@dataclass(frozen=True)
class CheckedFile:
    """One file that was read."""

    file: ChosenFile
    wrong: str
    """What is wrong with it, to follow its name; empty if it is valid."""
    seconds: float


@dataclass(frozen=True)
class VerifiedStep:
    """What a verification found for one step."""

    root: str
    step: int
    state: Literal["valid", "corrupted", "restored", "replaced"]
    """``restored``: it was marked as corrupted and is valid again; ``replaced``: another commit
    took its place, or it was removed meanwhile."""
    files: int
    nbytes: int
    seconds: float
    """Of reading, summed over its files."""
    wrong: str = ""


def choose_files(
    root: str | Path,
    *,
    step: int | None = None,
    newest: int = 0,
    sample_bytes: int = 0,
    seed: int = 0,
) -> list[ChosenFile]:
    """The files to read.

    Args:
        root: the job's folder.
        step: all files of this step.
        newest: all files of so many newest steps.
        sample_bytes: about so many bytes of all steps, at least a file. All files lie on a circle,
            in an order of their own, and each seed takes the next arc of it: with the number of the
            day as seed, every file has its turn.
        seed: which arc.

    Raises:
        CommitError: ``step`` is not committed.
    """
    if step is not None and read_manifest(root, step) is None:
        raise CommitError(
            f"step {step} in {root} is not committed, so there is nothing to compare its files "
            "with (trinity-sync ls shows the committed steps)"
        )
    manifests = list(committed_steps(root))
    by_age = sorted(manifests, key=lambda manifest: (manifest.run, manifest.step))
    whole = {manifest.step for manifest in by_age[len(by_age) - min(newest, len(by_age)) :]}
    if step is not None:
        whole.add(step)
    files = [_chosen(root, manifest, record) for manifest in manifests for record in manifest.files]
    sample = set(_arc(files, sample_bytes, seed)) if sample_bytes else set()
    return [file for file in files if file.step in whole or file in sample]


def split_evenly(files: Sequence[ChosenFile], number: int) -> list[list[ChosenFile]]:
    """Return the files in lists of about the same size, empty ones left out.

    Args:
        files: to read.
        number: of lists.
    """
    lists: list[list[ChosenFile]] = [[] for _ in range(number)]
    sizes = [0] * number
    for file in sorted(files, key=lambda file: -file.record.nbytes):
        least = sizes.index(min(sizes))
        lists[least].append(file)
        sizes[least] += file.record.nbytes
    return [files for files in lists if files]


def check_files(
    files: Sequence[ChosenFile],
    *,
    nice: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = no_progress,
) -> list[CheckedFile]:
    """Read files, past the page cache, and compare them with what their manifests say.

    Args:
        files: which.
        nice: by how much the reading threads yield to others, as in nice(1).
        clock: seconds.
        on_progress: is told how far the reading is.

    Raises:
        ConfigError: the root is not there, or this process may not read it, which says nothing
            about its files.
    """
    found = []
    whole = sum(file.record.nbytes for file in files)
    steps: dict[tuple[str, int], list[ChosenFile]] = {}
    for file in files:
        steps.setdefault((file.root, file.step), []).append(file)
    with ThreadPoolExecutor(1, "verify", initializer=partial(yield_to_others, nice)) as pool:
        for (root, step), of_step in steps.items():
            if not Path(root).is_dir():
                raise ConfigError(f"{root} is not there; is it mounted on this node?")
            with _leased(root, step):
                for file in of_step:
                    start = clock()
                    wrong = pool.submit(
                        _what_is_wrong, file, lambda n: on_progress(n, whole)
                    ).result()
                    found.append(CheckedFile(file, wrong, clock() - start))
    return found


def judge_steps(
    checked: Sequence[CheckedFile], *, clock: Callable[[], float] = time.time
) -> list[VerifiedStep]:
    """Mark corrupted steps, remove the mark of those that are valid again, move the pointers.

    Raises:
        OSError: the root cannot be written, so nothing can be marked.
    """
    steps: dict[tuple[str, int], list[CheckedFile]] = {}
    for one in checked:
        steps.setdefault((one.file.root, one.file.step), []).append(one)
    return [_judge_step(root, step, steps[root, step], clock()) for root, step in sorted(steps)]


def _judge_step(root: str, step: int, checked: list[CheckedFile], now: float) -> VerifiedStep:
    nbytes = sum(one.file.record.nbytes for one in checked)
    verdict = partial(
        VerifiedStep,
        root=root,
        step=step,
        files=len(checked),
        nbytes=nbytes,
        seconds=sum(one.seconds for one in checked),
    )
    before = read_corruption(root, step)
    if before is None and not any(one.wrong for one in checked):
        return verdict(state="valid")
    with one_change_at_a_time(root):
        manifest, before = _manifest(root, step), read_corruption(root, step)
        if manifest is None or any(_is_stale(one.file, manifest) for one in checked):
            return verdict(state="replaced")
        seen = {one.file.record.path: one.wrong for one in checked}
        known = before.files if before else {}
        try:
            require_own_release(root, step)
        except FormatError as error:
            return verdict(state="corrupted", wrong=str(error))
        named = {record.path for record in manifest.files}
        old = {name: wrong for name, wrong in known.items() if name in named - seen.keys()}
        wrong = {**old, **{name: what for name, what in seen.items() if what}}
        if wrong:
            corruption = Corruption(wrong, now)
            mark_corrupted(root, step, corruption)
        else:
            remove_mark(step_folder(root, step))
        for kind in KINDS:
            repair_latest_pointer(root, kind)
    if wrong:
        return verdict(state="corrupted", wrong=str(corruption))
    return verdict(state="restored")


def _what_is_wrong(file: ChosenFile, took: Callable[[int], object]) -> str:
    folder = step_folder(file.root, file.step)
    path = folder / file.record.path
    if not path.resolve().is_relative_to(folder.resolve()):
        return "leads out of the step's folder"
    try:
        found = path.stat().st_size
        if found != file.record.nbytes:
            return f"has {found:,} bytes instead of {file.record.nbytes:,}"
        digest = digest_file(path, found, took)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno not in BROKEN:
            raise ConfigError(
                f"{path} cannot be read here ({error.strerror}), which says nothing about the "
                "file; mend that and verify again"
            ) from error
        return f"cannot be read ({error.strerror})"
    if digest != file.record.digest:
        return f"has digest {digest} instead of {file.record.digest}"
    return ""


@contextmanager
def _leased(root: str, step: int) -> Iterator[None]:
    """A lease, if the step can have one; one that is corrupted cannot, and is read all the same."""
    with ExitStack() as leased:
        with suppress(CommitError, FormatError, OSError):
            leased.enter_context(acquire_lease(root, step, "verify", ttl_s=LONG_LEASE_S))
        yield


def _manifest(root: str, step: int) -> Manifest | None:
    try:
        return read_manifest(root, step)
    except (ManifestError, FormatError):
        return None


def _is_stale(file: ChosenFile, manifest: Manifest) -> bool:
    return file.run != manifest.run or file.record != manifest.file(file.record.path)


def _chosen(root: str | Path, manifest: Manifest, record: FileRecord) -> ChosenFile:
    return ChosenFile(str(Path(root).resolve()), manifest.step, manifest.run, record)


def _arc(files: Sequence[ChosenFile], nbytes: int, seed: int) -> Iterator[ChosenFile]:
    """The files that begin in the seed's arc of the circle; where none does, the one around it."""
    around = sorted(files, key=_place)
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


def _place(file: ChosenFile) -> bytes:
    return hashlib.sha256(f"{file.run}/{file.step}/{file.record.path}".encode()).digest()
