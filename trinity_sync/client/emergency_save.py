"""A save within the seconds that a preempted process has left.

The weights go first, as a sync of their own, and the rest after them: the two add up to one
checkpoint, and if time runs out in between, the weights are what is left.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_sync.errors import SaveTimeoutError, TrinitySyncError
from trinity_sync.layout import Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmergencySave:
    """What became of the save of a process that is about to end."""

    step: int
    submitted: tuple[str, ...]
    """Components that are sealed in the spool; they survive the process, not the machine."""
    committed: tuple[Kind, ...]
    """What the step is good for now: nothing, the weights (``state_dict``), or all of it."""
    undone: tuple[str, ...]
    """A sentence for all that was not done, and for earlier saves that have failed."""


def run_emergency_save(
    step: int,
    components: Mapping[str, Any],
    deadline_s: float,
    *,
    kinds: Sequence[Kind] = ("state_dict", "checkpoint"),
    save: Callable[[Kind, Mapping[str, Any]], Sequence[str]],
    wait: Callable[[float], None],
    failures: Callable[[], Sequence[str]],
    committed: Callable[[], tuple[Kind, ...]],
) -> EmergencySave:
    """Submit what fits into ``deadline_s`` seconds, and wait for its commit with what is left.

    Args:
        step: training step.
        components: state by component.
        deadline_s: seconds for all of it.
        kinds: saves of the step, in their order.
        save: stages and submits; returns the components that are sealed, or raises.
        wait: waits so many seconds for all saves, and raises what `wait_all` does.
        failures: earlier saves that failed and that ``wait``, out of time, did not raise.
        committed: what is committed of the step.
    """
    deadline = time.monotonic() + deadline_s
    weights = {name: state for name, state in components.items() if name == "model"}
    saves: list[tuple[Kind, Mapping[str, Any]]] = [
        (kind, weights if kind == "state_dict" else components)
        for kind in kinds
        if kind == "checkpoint" or (weights and len(components) > 1)
    ]
    sealed: list[str] = []
    undone: list[str] = []
    for kind, states in saves:
        new = [name for name in states if name not in sealed]
        if time.monotonic() >= deadline:
            undone.append(f"{', '.join(new)}: not submitted, the {deadline_s:g} s were over")
            break
        try:
            found = save(kind, states)
        except Exception as error:
            undone.append(f"{', '.join(new)}: not submitted, {_text_of(error)}")
            break
        sealed += [name for name in found if name not in sealed]
    try:
        wait(max(0.0, deadline - time.monotonic()))
    except SaveTimeoutError as error:
        undone += [f"{error} Until then the images wait in the spool of this node.", *failures()]
    except Exception as error:
        undone.append(_text_of(error))
    done = EmergencySave(step, tuple(sealed), committed(), tuple(undone))
    logger.warning(
        "Emergency save of step %s: %s submitted, committed as %s%s",
        step,
        ", ".join(sealed) or "nothing",
        " and ".join(done.committed) or "nothing",
        "".join(f"; {sentence}" for sentence in undone),
    )
    return done


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, TrinitySyncError) else f"{type(error).__name__}: {error}"
