"""The task of a restore drill, and its report."""

from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.orchestration.job_registry import roots_of
from trinity_sync.settings import Settings


@task(name="restore", persist_result=False)
def restore_newest(root: str | None) -> None:
    """Load the newest checkpoint of a job, or of each that is known, and show what it took.

    Raises:
        CommitError: one cannot be loaded; the others were, and are shown.
    """
    from trinity_sync.storage.drill import drill  # torch takes seconds, and saves need it not

    rows, failures = [], []
    for each in roots_of(root, Settings()):
        try:
            done = drill(each)
        except (TrinitySyncError, OSError) as error:
            failures.append(str(error))
            rows.append({"root": str(each), "step": "", "result": str(error)})
            continue
        if done:
            result = "loaded, digests compared" if done.checked else "loaded"
            rows.append(
                {
                    "root": done.root,
                    "step": str(done.step),
                    "result": result,
                    "seconds": f"{done.seconds:.2f}",
                    "GB/s": f"{done.nbytes / done.seconds / 1e9:.2f}",
                    "bytes": f"{done.nbytes:,}",
                    "files": str(done.files),
                }
            )
    show(rows)
    if failures:
        raise CommitError("; ".join(failures))


def show(rows: Sequence[dict[str, str]]) -> None:
    """Put the drill into the run's page of the Prefect UI."""
    create_table_artifact(
        key="restore-drill",
        description="How long a restart would wait for its newest checkpoint, on this node",
        table=list(rows),
    )
