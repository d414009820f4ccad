"""Copy a committed step into a store."""

from typing import Any
from urllib.parse import urlsplit

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from trinity_sync.errors import RemoteError
from trinity_sync.orchestration.roots import require_allowed
from trinity_sync.settings import Settings
from trinity_sync.storage.replicate import replicate


async def _store_was_away(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the store failed, which may pass; a step that is damaged here stays so."""
    try:
        await state.aresult()
    except RemoteError:
        return True
    except Exception:
        return False
    return False


@task(
    name="replicate",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_store_was_away,
    persist_result=False,
)
def replicate_step(root: str, step: int, url: str, keep_last: int) -> None:
    """Send what the store lacks of the step, then its manifest; show what it cost."""
    settings = Settings()
    require_allowed(settings, root)
    if (store := urlsplit(url)).scheme in ("file", "local"):
        require_allowed(settings, f"{store.netloc}{store.path}")
    done = replicate(root, url, step, keep_last=keep_last)
    removed = f"; removed there: steps {list(done.removed)}" if done.removed else ""
    create_markdown_artifact(
        key="replicated",
        markdown=f"Step {step} of `{root}` is at `{done.url}`: {done.uploaded} files, "
        f"{done.nbytes:,} bytes sent in {done.seconds:.1f} s{removed}.",
    )
