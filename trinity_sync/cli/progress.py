"""Progress bar on stderr, if it is a terminal. It disappears when the work is done."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.fs.progress import OnProgress, no_progress


@contextmanager
def progress_bar(what: str, *, of_steps: bool = False) -> Iterator[OnProgress]:
    """Show a progress bar of bytes or steps, and yield the callback that updates it.

    ``what`` describes the work, such as ``reading``.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress
    from rich.console import Console

    bytes_columns = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *([progress.MofNCompleteColumn()] if of_steps else bytes_columns),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout may be a file
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)
