"""Command that makes an earlier step the newest: rewind."""

from typing import Annotated

import typer

from trinity_sync.cli.app import Root, Step, Yes, app, confirm, read_settings, resolve_step_argument
from trinity_sync.cli.output import Output, print_object
from trinity_sync.cli.schema import RewindReport


@app.command(
    "rewind ckpts 40", "rewind ckpts latest~1 --dry-run", "rewind ckpts best --yes",
    panel="Keep and remove steps",
    note="Nothing is changed, with exit code 1, if a newer step is leased, pinned or tagged, "
        "or the answer is no. To undo it: mv ROOT/.trinity_sync/quarantine/TIME/* ROOT/, and then "
        "trinity-sync rewind ROOT STEP to the newest of them.",
)  # fmt: skip
def rewind(
    root: Root,
    step: Step,
    force: Annotated[
        bool, typer.Option("--force", help="Quarantine pinned and tagged steps as well.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be quarantined, and change nothing.")
    ] = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Make an earlier step the newest; newer steps are quarantined, not deleted."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage.rewind import list_newer_steps
    from trinity_sync.storage.rewind import rewind as rewind_to

    number = resolve_step_argument(root, step)
    newer = list_newer_steps(root, number)
    what = f"quarantine {len(newer)} newer steps ({_join(newer)})" if newer else "no newer step"
    if dry_run:
        report = RewindReport(number, True, None, newer, None)
        print_object("rewind", report, output, f"would rewind {root} to step {number}: {what}")
        return
    confirm(f"rewind {root} to step {number}: {what}", yes=yes)
    done = rewind_to(root, number, force=force)
    try_mirror(read_settings(), root, done.quarantined)
    folder = str(done.folder) if done.folder else None
    report = RewindReport(number, False, done.run, list(done.quarantined), folder)
    text = f"{root} is at step {number}; the next run resumes from there"
    if folder:
        text += f"\nin quarantine: steps {_join(list(done.quarantined))}, in {folder}"
    print_object("rewind", report, output, text)


def _join(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
