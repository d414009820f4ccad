"""Artifact of a save that was not committed; the flow itself creates it."""

import logging
from collections.abc import Mapping, Sequence

from prefect.artifacts import acreate_markdown_artifact

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.run_page import (
    FailedTask,
    SaveFailure,
    StepOutcome,
    describe_failure,
    summarize_failure,
)
from trinity_sync.storage.discovery import find_newest

logger = logging.getLogger(__name__)


async def create_failure_artifact(
    request: SaveRequest,
    outcome: StepOutcome,
    reason: str,
    failed: Sequence[FailedTask],
    remaining: Mapping[str, int],
) -> None:
    """Show in the Prefect UI what failed, what is safe and what to do; never raises.

    ``remaining`` has the images of the save that are still in memory, by node.
    """
    try:
        newest = await run_in_thread(find_newest, request.root, request.kind)
        last = newest.step if newest else None
        failure = SaveFailure(outcome, reason, failed, last, remaining)
        await acreate_markdown_artifact(
            key=make_artifact_key("save", request.root),
            markdown=describe_failure(request, failure),
            description=summarize_failure(request, failure),
        )
    except Exception as error:
        logger.warning("%s failed; cannot create its artifact: %r", request.run_name, error)
