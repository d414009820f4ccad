"""Events about the steps of a job, for automations such as "no commit within 30 minutes".

The resource of an event is the job, ``trinity-sync.job.<job id>``. Prefect sends events from a
thread; an event that cannot be sent is dropped and never fails a save.
"""

import logging
from pathlib import Path
from typing import Any

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

from trinity_sync.layout import Kind
from trinity_sync.orchestration.run_page import StepOutcome

logger = logging.getLogger(__name__)

PREFIX = "trinity_sync.step."
JOB_RESOURCE = "trinity-sync.job."


def emit_step_event(
    outcome: StepOutcome,
    root: str | Path,
    step: int,
    *,
    job: str,
    run: int | None = None,
    kind: Kind | None = None,
    **payload: Any,
) -> None:
    """Send the event ``trinity_sync.step.<outcome>``; never raises.

    None is sent for weights that were evicted: newer weights supersede them, so nothing is lost.
    ``root`` is a real path; ``run`` is None if it is unknown, ``kind`` for the whole step. JSON can
    represent the values of ``payload``.
    """
    if not PREFECT_API_URL.value():  # Prefect would start a server of its own
        return
    if outcome == "evicted" and kind != "checkpoint":
        return
    try:
        emit_event(
            event=PREFIX + outcome,
            resource={
                "prefect.resource.id": JOB_RESOURCE + job,
                "prefect.resource.name": job,
                "trinity-sync.root": str(root),
            },
            payload={"step": step, "run": run, "kind": kind, **payload},
        )
    except Exception as error:
        logger.warning("cannot send the event that step %d is %s: %r", step, outcome, error)
