"""A store as the place where steps count: the root is where they are made, and may vanish.

::

    url/global_step_40/manifest.json        its appearance is what counts
    url/.trinity_sync/runs/3.json           run 3 writes here, and no other of its number

A checkpoint is committed in the root, then sent (`send`), then noted as sent. A run claims its
number in the store with the first step it sends, by a write that the store takes only once
(``If-None-Match`` on S3), and so does each manifest. So of two trainings that write to one store,
the one that a later run has left behind is refused, and of two with one number the second.

What a store cannot do is lock: a training that was left behind while it sends a step that the
later one has just sent, too, may put its bytes in the place of theirs. The digests of the manifest
show it, and a resume takes the step before (`fetch_newest`).
"""

import logging
from pathlib import Path

from trinity_sync.errors import (
    ConfigError,
    CorruptedCopyError,
    FormatError,
    ManifestError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.locks import file_lock_if_free
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import Replicated, replicate
from trinity_sync.retention.planner import Rules, describe_step, plan_removals
from trinity_sync.retention.policies import All, parse_policy
from trinity_sync.storage.discovery import committed_steps, newest, require_committed
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.pins import steps_in_use
from trinity_sync.storage.required_remote import (
    is_sent,
    must_be_sent,
    note_sent,
    write_required_remote,
)
from trinity_sync.storage.runs import Run, add_run, build_lineage, find_superseding_run, list_runs

logger = logging.getLogger(__name__)


def init_required_remote(root: Path, url: str) -> Manifest | None:
    """Require a remote for the steps of a root from now on, and fetch its newest step.

    Args:
        root: the job's root; it may be new.
        url: the job's folder in the store.

    Returns:
        The step that was fetched; None if the root has the newest.

    Raises:
        RemoteError: the store cannot be read and written.
        CommitError: another step has the place of the store's newest.
        FormatError: another release has begun a run or sent a newer step there.
    """
    remote = Remote(url)
    if not remote.writes_once():
        logger.warning(
            "%s takes a second write of a name that must be written once (If-None-Match): two "
            "trainings that write there at the same time are not kept apart",
            remote.url,
        )
    write_required_remote(root, remote.url)
    return fetch_newest(root, remote)


def fetch_newest(root: Path, remote: Remote) -> Manifest | None:
    """Fetch the newest checkpoint of a store, unless the root has that one or a newer one.

    One whose bytes are not those of its manifest is passed over, as a corrupted one in a root is.
    """
    for run in remote.runs():
        add_run(root, run)  # the next run here gets a number that is free there
    for manifest in remote.newest_first():
        if "checkpoint" not in manifest.kinds:
            continue
        here = newest(root)
        if here and (here.run, here.step) >= (manifest.run, manifest.step):
            return None
        try:
            logger.info("fetching step %d of %s into %s", manifest.step, remote.url, root)
            fetched, _ = fetch(remote.url, manifest.step, root, replace=True)
        except CorruptedCopyError as error:
            logger.error("the step before is taken: %s", error)
            continue
        note_sent(root, remote.url, fetched)
        return fetched
    return None


def send(root: Path, url: str, step: int, *, on_progress: OnProgress = no_progress) -> Replicated:
    """Have a committed checkpoint in the store, and write down that it is there.

    Raises:
        SupersededError: another training has gone on from an earlier step, or has this run's
            number.
        CommitError, RemoteError: as ``replicate``.
    """
    remote = Remote(url)
    manifest = require_committed(root, step)
    _claim(root, remote, manifest)
    done = replicate(root, url, step, on_progress=on_progress)
    note_sent(root, remote.url, manifest)
    return done


def send_missing(root: Path, url: str) -> list[int]:
    """Send the older checkpoints that did not get there, as while the store was away.

    What cannot be sent is logged, and has its turn the next time. Nothing is done while another
    process does it.
    """
    sent = []
    with file_lock_if_free(root / PRIVATE_FOLDER / "sending.lock") as ours:
        for manifest in committed_steps(root) if ours else ():
            try:
                if not must_be_sent(root, manifest):
                    continue
                send(root, url, manifest.step)
                sent.append(manifest.step)
            except TrinitySyncError as error:
                logger.warning("step %d is not in %s: %s", manifest.step, url, error)
    return sent


def prune_remote(root: Path, url: str, policy: str, now: float) -> tuple[int, ...]:
    """Remove from the remote what a policy does not keep.

    The newest stays, and what is in use in the root. Of a required remote, only what this root has
    sent or fetched goes.

    Raises:
        ConfigError: the policy cannot be understood, or goes by metrics, which no store has.
    """
    rules = Rules(parse_policy(policy), All())
    if "best=" in policy:
        raise ConfigError(f"TRINITY_SYNC_REMOTE_KEEP={policy}: a store has no metrics for best=...")
    if isinstance(rules.checkpoints, All):
        return ()  # without a look
    remote, held = Remote(url), steps_in_use(root)
    there = {manifest.step: manifest for manifest in remote.committed()}
    line = build_lineage(list_runs(root), lambda step: there[step].run if step in there else 0)
    infos = [
        describe_step(each, held=held.get(step, ()), superseded_by=line.supersedes(each.run))
        for step, each in there.items()
    ]
    gone = [each.step for each in plan_removals(infos, rules, now).removed]
    ours = []
    for step in gone:
        try:
            if is_sent(root, there[step]):
                remote.remove(step)
                ours.append(step)
        except FormatError as error:
            logger.warning("step %d stays in %s: %s", step, url, error)
    return tuple(ours)


def _claim(root: Path, remote: Remote, manifest: Manifest) -> None:
    """See that no other training has the store, and let none have this run's number."""
    number, step = manifest.run, manifest.step
    run = next((run for run in list_runs(root) if run.number == number), Run(number, "", 0))
    theirs = remote.claim_run(run)
    if theirs != run:
        raise SupersededError(
            f"step {step} of run {number} in {root} is not sent: run {number} at {remote.url} is "
            "another training's, begun elsewhere. Stop one of the two; the one that goes on has to "
            "be started anew, and resumes from the newest step there."
        )
    if later := find_superseding_run(remote.runs(), number, step):
        raise SupersededError(
            f"step {step} of run {number} in {root} is not sent: run {later.number} at "
            f"{remote.url} resumed from step {later.resumed_from}, which leaves it behind. Stop "
            "this training."
        )
    try:
        there = remote.manifest(step)
    except ManifestError:
        return  # it is replaced
    if there and there.run > number:
        raise SupersededError(
            f"step {step} of run {number} in {root} is not sent: {remote.url} has that of run "
            f"{there.run}. Stop this training."
        )
