"""Restore of a committed step into tensors that live: one copy, and no memory besides theirs.

Bytes reach a tensor before the digest of their file is known, so an error on the way says which
components have changed. Everything that can be checked earlier is: all files are opened, and their
tensors compared with the live ones, before the first is filled.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.direct_io import digest_fd, map_fd, read_fd, scatter_fd
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import ShardFile, find_own_shards, is_for_several_ranks
from trinity_sync.tensors.deserialize import load_image
from trinity_sync.tensors.in_place import Filling, plan_copies, plan_filling
from trinity_sync.tensors.safe_load import is_plain_forced

logger = logging.getLogger(__name__)


def fill_states(
    root: str | Path,
    manifest: Manifest,
    role: str,
    live: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    only: Sequence[str] = (),
    run_together: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> dict[str, Any]:
    """Fill live states, by component, from a step, and return those of the step.

    Live tensors are in the place of the saved ones; an object with a ``load_state_dict`` is left to
    the caller. What has to succeed on all ranks before any of them goes on is passed to
    ``run_together``.

    Raises:
        CommitError: as `load_states`; the message says which components have changed.
        ConfigError: the step has no such component, or other tensors; nothing was changed.
    """
    folder, shards = step_folder(root, manifest.step), list[_LiveShard]()

    def plan_all() -> None:
        records = find_own_shards(root, manifest, role, rank, world_size, only)
        if unknown := sorted(live.keys() - records.keys()):
            raise ConfigError(
                f"step {manifest.step} in {root}, role {role}, has no component "
                f"{', '.join(unknown)} to fill: it has {', '.join(records)}"
            )
        for name, state in live.items():
            if hasattr(state, "load_state_dict"):  # which the caller calls
                continue
            cached = is_for_several_ranks(manifest, records[name])
            file = ShardFile(folder, records[name], spool, cached=cached)
            opened.callback(file.close)
            shards.append(_LiveShard(file, state))

    with ExitStack() as opened:
        run_together(plan_all)
        return run_together(lambda: _fill_all(shards))


def _fill_all(shards: "Sequence[_LiveShard]") -> dict[str, Any]:
    states = {}
    for number, shard in enumerate(shards):
        try:
            states[shard.component] = shard.fill()
        except Exception as error:
            done, rest = (
                ", ".join(each.component for each in part) or "none"
                for part in (shards[:number], shards[number + 1 :])
            )
            raise CommitError(
                f"{error} Tensors of {shard.component} have changed and hold no step's state; "
                f"filled before: {done}; unchanged: {rest}."
            ) from error
    return states


class _LiveShard:
    """The shard of one component, and the live state that is filled from it."""

    def __init__(self, file: ShardFile, live: Any) -> None:
        self.component = file.record.component
        self._file, self._live = file, live
        self._planned: tuple[Filling, str] | None = file.read(self._plan)

    def _plan(self, fd: int) -> tuple[Filling, str]:
        """Plan how to fill the live state; return the digest as well if that took all bytes.

        Raises:
            ConfigError: the tensors differ.
        """
        record, path = self._file.record, self._file.path
        if self._file.trusted and not is_plain_forced():
            try:
                return plan_filling(map_fd(fd, record.nbytes), self._live), ""
            except ConfigError:
                raise
            except Exception as error:  # bytes that are not yet compared may raise anything
                logger.info("%s cannot be read in place: %s", path, error)
        image, digest = read_fd(fd, record.nbytes)
        if digest != record.digest:
            return Filling(None), digest
        return plan_copies(load_image(image, path, trusted=self._file.trusted), self._live), digest

    def fill(self) -> Any:
        """Fill the live state; return the step's, with live tensors at the places of its own.

        Raises:
            CommitError: the file is corrupted, or cannot be read.
        """
        filling, _ = self._file.read(self._fill)
        filling.finish()
        return filling.state

    def _fill(self, fd: int) -> tuple[Filling, str]:
        filling, digest = self._planned or self._plan(fd)
        self._planned = None  # the next source is another file
        if digest:
            return filling, digest
        nbytes = self._file.record.nbytes
        if self._file.in_memory and filling.is_in_memory:
            return filling, scatter_fd(fd, nbytes, filling.places)
        return filling, digest_fd(fd, nbytes, filling.put)
