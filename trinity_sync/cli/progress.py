"""A bar on stderr while a command reads or copies; none where stderr is no terminal.

It goes away with its block: what stays is what the command prints afterwards.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.fs.progress import OnProgress, no_progress


@contextmanager
def progress_bar(what: str, *, of_steps: bool = False) -> Iterator[OnProgress]:
    """Show how far it is; the block hands the callback to whoever does the work.

    Args:
        what: is done, in a word or two.
        of_steps: steps are counted, not bytes.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress
    from rich.console import Console

    done = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *([progress.MofNCompleteColumn()] if of_steps else done),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # which may be a file while stderr is not
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, whole: shown.update(task, advance=done, total=whole)
