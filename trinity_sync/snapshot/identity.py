"""The identities of a job, of a save, and of the rank that submits images for it.

The path of a job's root alone is none: a root may be removed, moved or copied.

::

    root/.trinity_sync/identity.json        random, made once with the root

The identifier of a job (`job_id`) is a digest of its root's path and this identity. It names the
job's folder in the spool, its flow runs and its events, so nothing that a removed root has left in
them is taken for that of a new one. A moved root keeps its identity. A copy gets a new one when it
is opened, because both may train on.

Only `open_identity` writes. A root without an identity, such as another system's, has an identifier
by its path.

The identity names the format of everything in the root but manifests and runs, which name their
own. Whoever opens a root reads it first, so a root of another release is refused before anything is
read or changed there.

Tickets, requests of flow runs and commits all name a save by the same `SaveId`. The number of a run
does not name it: a root that was restored, or fetched again, gives the number to another run.
"""

import hashlib
import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from trinity_sync.errors import CommitError, RootAwayError, RootError, TrinitySyncError
from trinity_sync.fs.atomic import (
    UNWRITABLE,
    list_paths,
    make_folder,
    make_temporary_path,
    read_uncached,
    replace_file,
)
from trinity_sync.fs.locks import LOCKS, acquire_file_lock, create_file, open_lock_file
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import (
    PRIVATE_FOLDER,
    ROOT_FORMAT,
    Kind,
    WriteConcurrency,
    job_id_of,
    step_folder,
)

Export = Literal["", "hf_model", "hf_model with remote code"]
"""Whether a role's model is exported once the step is committed."""


class OfRun(Protocol):
    """What a run has made of a step."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def run(self) -> int:
        """Number of the run."""

    @property
    def run_key(self) -> str:
        """Key of the run; empty if it is unknown."""


def is_of_other_run(one: OfRun, other: OfRun) -> bool:
    """Return whether two things are of different runs of a job; an empty key is an unknown one."""
    return one.run != other.run or len({one.run_key, other.run_key} - {""}) > 1


def label_run(of: OfRun) -> str:
    """Return the number of a run and a digest of its key, which no other start of the job has."""
    return f"run{of.run}-{hashlib.sha256(of.run_key.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class SaveId:
    """One save of a job: a step of a run, as a checkpoint or as weights for a sync."""

    root: str
    """Absolute path of the job's root."""
    run: Count
    run_key: str
    """Key of the run, which all of its processes share."""
    step: Count
    kind: Kind
    roles: tuple[str, ...]
    """Roles that the save is made of."""
    identity: str = field(default="", kw_only=True)
    """Identity of the job, as in its root; empty for a root that no coordinator has opened."""
    attempt: Count = field(default=1, kw_only=True)
    """Number of the submission. A save that failed is submitted again as the next one, and a commit
    takes the images of one attempt of all roles and ranks."""

    @property
    def job(self) -> str:
        """Identifier of the job; its root is not asked."""
        return job_id_of(Path(self.root), self.identity)

    @property
    def folder(self) -> Path:
        """The step's folder."""
        return step_folder(self.root, self.step)

    @property
    def key(self) -> str:
        """Idempotency key: an attempt has one flow run, however often it is requested."""
        roles = "" if self.kind == "checkpoint" else f"/{'+'.join(sorted(self.roles))}"
        attempt = "" if self.attempt == 1 else f"/attempt{self.attempt}"
        return f"{self.job}/{label_run(self)}/step{self.step}/{self.kind}{roles}{attempt}"

    def is_of_step(self, origin: "Origin") -> bool:
        """Return whether an image is of the same step of the same run of the same job."""
        mine = (self.root, self.identity, self.run, self.run_key, self.step)
        theirs = (origin.root, origin.identity, origin.run, origin.run_key, origin.step)
        return mine == theirs

    def owns(self, origin: "Origin") -> bool:
        """Return whether an image was submitted with this attempt of the save."""
        mine, theirs = (self.kind, self.attempt), (origin.kind, origin.attempt)
        return mine == theirs and origin.role in self.roles and self.is_of_step(origin)

    def __str__(self) -> str:
        return f"{self.kind} of step {self.step} (run {self.run}) in {self.root}"


@dataclass(frozen=True)
class Origin(SaveId):
    """Where images come from: a save, and one rank of one of its roles."""

    role: str
    rank: Count
    world_size: Count
    keep: Count = 0
    """Checkpoints to keep once this one is committed; 0 for all."""
    export: Export = ""
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    """Those that the rank had recorded for the step and perhaps not written."""
    write_concurrency: WriteConcurrency = "all"
    """The trainer's write concurrency, which all tasks of the job apply."""
    replicated: tuple[str, ...] = ()
    """Components that rank 0 alone saves, for all ranks."""
    replicas: dict[str, tuple[Count, ...]] = field(default_factory=dict, hash=False)
    """Ranks that have a component as this one has it, by component; the first saves it for all."""

    def count_ranks(self, component: str) -> int:
        """Return the number of ranks that save a component."""
        return 1 if component in self.replicated else self.world_size

    @property
    def save(self) -> SaveId:
        """The save that the images belong to."""
        of_run = self.root, self.run, self.run_key
        of_step = self.step, self.kind, self.roles
        return SaveId(*of_run, *of_step, identity=self.identity, attempt=self.attempt)


@dataclass(frozen=True)
class Parent:
    """A committed step from which another step was made, or a run has begun."""

    root: str
    """Real path of its root at that time."""
    identity: str
    """Identity of its root."""
    run: Count
    step: Count
    digest: str
    """`Manifest.weights_digest` of it."""
    weight: float = 1.0
    """Its share in a merge; the shares of all parents add up to 1."""

    def __str__(self) -> str:
        share = "" if self.weight == 1 else f" x {self.weight:.3g}"
        return f"step {self.step} of run {self.run} in {self.root}{share}"


IDENTITY_FILE = f"{PRIVATE_FOLDER}/identity.json"


@dataclass(frozen=True)
class JobIdentity(Record, format=ROOT_FORMAT):
    """Content of the identity file."""

    identity: str
    root: str
    """Real path of the root that was opened last with this file: tells a copy from the original."""


def job_id(root: str | Path) -> str:
    """Return the identifier of the job at a root: the job's name and a digest.

    It asks the root's file system, which may hang; `SaveId.job` does not.

    Raises:
        CommitError, FormatError: as `read_identity`.
    """
    return job_id_of(Path(root).resolve(), read_identity(root))


def read_identity(root: str | Path) -> str:
    """Return the identity of the job at a root; empty if no process has opened the root yet.

    Raises:
        CommitError: the file is torn.
        FormatError: the root is of another release.
    """
    found = _read(root)
    return found.identity if found else ""


def explain_away(root: str | Path | None, job: str) -> str:
    """Return why this process does not see a job at its root; empty if it does, or for None."""
    try:
        if root is None or job_id_of(Path(root), read_identity(root)) == job:
            return ""
    except (OSError, TrinitySyncError) as error:  # ESTALE, EIO; it is torn
        return f"{root} does not tell whether job {job} is there: {error}"
    return (
        f"{root} is not mounted here, or was removed, moved or recreated: job {job} is not there. "
        "Mount it, or move it back; if it was removed, no action is needed."
    )


def require_root(root: str | Path, job: str) -> None:
    """Require that a job is at its root, before a file in it is created with its folders.

    Raises:
        RootAwayError: it is not.
        FormatError: another release has made the root.
    """
    if why := explain_away(root, job):
        with suppress(OSError, CommitError):
            read_identity(root)
        raise RootAwayError(why)


def open_identity(root: Path, *, adopted: str = "") -> str:
    """Return the identity of the job at a root; create it if the root has none or is a copy.

    ``root`` is a real path that exists. A new root that continues another job adopts its identity.
    A root that cannot be written, and is only read, stays as it is.

    Raises:
        RootError: the file that another process has just created is not visible here.
        CommitError, FormatError: as `read_identity`.
    """
    found = _read(root)
    if found and found.root == str(root) and adopted in ("", found.identity):
        return found.identity
    made = JobIdentity(adopted or uuid.uuid4().hex, str(root))
    try:
        return _write(root, found, made, adopted)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return found.identity if found else ""


def list_registered_roots(home: Path) -> list[Path]:
    """Return the roots in the registry in a home, sorted by name, also those that are gone.

    It does not look at the roots, whose file systems may hang.
    """
    roots = []
    for entry in list_paths(home / "roots", "*.json"):
        try:
            roots.append(Path(json.loads(entry.read_text())["root"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            continue  # removed meanwhile, or not an entry
    return roots


def register_root(home: Path, root: str | Path) -> None:
    """Add the root of a job to the registry in a home, unless it is there.

    Raises:
        OSError: the home cannot be written.
    """
    if not (entry := registry_path(home, root)).exists():
        make_folder(entry.parent)
        create_file(entry, json.dumps({"root": str(Path(root).resolve())}))


def registry_path(home: Path, root: str | Path) -> Path:
    """Return the path of a root's entry: the root may be gone, so its path alone names it."""
    return home / "roots" / f"{job_id_of(Path(root).resolve())}.json"


def _write(root: Path, found: JobIdentity | None, made: JobIdentity, adopted: str) -> str:
    path = root / IDENTITY_FILE
    make_folder(path.parent)
    with suppress(OSError):  # so that steps can be removed when the disk is full
        make_folder(path.with_name("trash"))
        for name in LOCKS:
            with open_lock_file(path.with_name(name)):
                pass
    if found is None and create_file(path, encode_record(made)):
        return made.identity
    with acquire_file_lock(path.with_suffix(".lock")):
        found = _read(root)
        if found is None:
            raise RootError(
                f"{path} exists and cannot be read, or the root was just removed; retry"
            )
        if not adopted and (found.root == str(root) or not _is_copy(root, found)):
            made = replace(found, root=str(root))
        if made != found:
            replace_file(path, encode_record(made))
    return made.identity


def _is_copy(root: Path, found: JobIdentity) -> bool:
    """Return whether the root that an identity file names is another folder of this identity."""
    original = Path(found.root)
    proof = make_temporary_path(root / IDENTITY_FILE)
    proof.touch()
    try:
        is_same = (original / PRIVATE_FOLDER / proof.name).exists()  # mounted at two paths
        return not is_same and read_identity(original) == found.identity
    except OSError:  # it was moved, or is on another machine
        return False
    finally:
        proof.unlink()


def _read(root: str | Path) -> JobIdentity | None:
    path = Path(root) / IDENTITY_FILE
    try:
        return decode_record(JobIdentity, read_uncached(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CommitError(
            f"{path}, which identifies the job, is torn or edited; restore it from a copy of the "
            "root or of its remote, or remove it: saves in flight are then not committed"
        ) from error
