"""Save a step within the seconds that a preempted process has left.

The weights are saved first, as a sync of the step, and the other components after them. Together
they are one checkpoint; if time runs out in between, the weights are saved.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_sync.errors import SaveTimeoutError, TrinitySyncError
from trinity_sync.fs.signals import hold_handlers
from trinity_sync.layout import Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmergencySave:
    """The result of an emergency save."""

    step: int
    submitted: tuple[str, ...]
    """Components that are sealed in the spool; they survive the process, but not the machine."""
    committed: tuple[Kind, ...]
    """Kinds that are committed: none, the weights (``state_dict``), or ``checkpoint`` as well."""
    undone: tuple[str, ...]
    """A sentence for each component that was not saved and each earlier save that failed."""


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
    """Submit what fits into the time that is left, then wait for the commit until the deadline.

    ``deadline_s`` is for staging and commit together; ``kinds`` are saved in their order. ``save``
    stages and submits, and returns the sealed components, or raises. ``wait`` waits at most the
    given seconds for all saves, and raises as `wait_all`; ``failures`` returns those of earlier
    saves that it has not raised.
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
    try:
        with hold_handlers():
            for kind, states in saves:
                new = [name for name in states if name not in sealed]
                if time.monotonic() >= deadline:
                    undone.append(
                        f"{', '.join(new)}: not submitted, the {deadline_s:g} s were over"
                    )
                    break
                try:
                    found = save(kind, states)
                except Exception as error:
                    undone.append(f"{', '.join(new)}: not submitted, {_text_of(error)}")
                    break
                sealed += [name for name in found if name not in sealed]
    except Exception as error:
        logger.warning("A signal's handler raised an error in an emergency save: %s", error)
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
