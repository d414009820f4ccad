"""Prune of a remote: remove the copies that no policy keeps, by the plan of the root's removals."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import steps_on_disk
from trinity_sync.remote.remote_root import Remote, RemoteStep
from trinity_sync.remote.upload import claim_remote, sending_lock
from trinity_sync.retention.policies import ALL, StepInfo
from trinity_sync.retention.prune import IN_FLIGHT_S
from trinity_sync.retention.removal import (
    RemovalPlan,
    Rules,
    carry_out,
    describe_steps,
    make_step_info,
    plan_removals,
    read_now,
)
from trinity_sync.storage.job_settings import is_replicated

NOT_OURS = "this root has neither sent nor fetched it"


def prune_remote(
    root: str | Path, url: str, rules: Rules, *, just_copied: int | None = None
) -> RemovalPlan:
    """Remove the steps of a remote that no policy keeps; return what became of all steps there.

    A pin, tag, lease or pointer of the root keeps the copy of its step. Of a required remote, only
    steps that this root has sent or fetched are removed. The step ``just_copied`` stays.

    Raises:
        ConfigError: another job's steps are there.
        RemoteError: the remote cannot be read, or a step there cannot be removed; all others are.
    """
    if rules.checkpoints == ALL:
        return RemovalPlan((), (), {})  # without a request
    remote = Remote(url)
    claim_remote(Path(root), remote)
    place = RemoteSteps(root, remote)
    steps = describe_steps(place, just_committed=just_copied)
    done = carry_out(place, plan_removals(steps, rules, read_now(place.root, rules)))
    here = steps_on_disk(place.root)  # of these, an upload continues where one before it has ended
    # where the root cannot be written, what an upload has left stays
    with suppress(OSError), try_acquire_file_lock(sending_lock(place.root, remote.url)) as is_idle:
        for step in [each for each in place.left if is_idle and each not in here]:
            remote.remove_leftovers(step, IN_FLIGHT_S)
    if done.error:
        raise done.error
    return done


class RemoteSteps:
    """The copies of a root's steps in a remote."""

    def __init__(self, root: str | Path, remote: Remote) -> None:
        self.root = Path(root)
        self._remote = remote
        self.left: list[int] = []
        """Steps without a manifest, as of the last `list_steps`."""

    def __str__(self) -> str:
        return self._remote.url

    def list_steps(self) -> list[StepInfo]:
        """As `Place.list_steps`."""
        found = self._remote.list_steps()
        self.left = [each.step for each in found if each.state == "not committed"]
        return [info for each in found if (info := self._describe(each))]

    def read_step(self, step: int) -> StepInfo | None:
        """As `Place.read_step`."""
        return self._describe(self._remote.read_step(step))

    def remove_step(self, step: StepInfo, find_reason: Callable[[], str], *, reduce: bool) -> str:
        """As `Place.remove_step`; a remote has no locks, and leases need the root's files alone."""
        why = find_reason()
        if not why:
            self._remote.remove_step(step.step)
        return why

    def _describe(self, found: RemoteStep) -> StepInfo | None:
        if found.manifest is None:
            return None
        held = () if is_replicated(self.root, found.manifest) else (NOT_OURS,)
        corruption = "" if found.state == "valid" else "files are missing or have other sizes"
        return make_step_info(found.manifest, held=held, corruption=corruption)
