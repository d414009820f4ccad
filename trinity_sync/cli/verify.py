"""The command that reads committed steps again: verify."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import (
    DONE,
    PROBLEM_FOUND,
    RootOrUrl,
    app,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.completion import complete_step
from trinity_sync.cli.output import Output, print_rows, progress_bar
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import MANIFEST, parse_number
from trinity_sync.orchestration.quantities import parse_size

if TYPE_CHECKING:
    from trinity_sync.storage.verify import VerifiedStep

DAY_S = 86_400


@app.command(
    "verify ckpts", "verify ckpts 40", "verify ckpts --sample 2%",
    "verify s3://bucket/job latest", panel="Look after steps",
    note="Exit code 3 if a step is corrupted. Steps in a remote are read and reported, but not "
        "marked.",
)  # fmt: skip
def verify(
    root: RootOrUrl,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP", autocompletion=complete_step, help="Step to read (default: latest)."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Read the N newest steps instead.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|SIZE",
            help="Read a sample of all steps instead, e.g. 2% or 50GB; other files each day.",
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Read files again and compare their digests; mark corrupted steps, which are not loaded."""
    given = [step, limit, sample]
    if sum(each is not None for each in given) > 1:
        raise ConfigError("pass one of STEP, --limit and --sample")
    if "://" in root:
        if sample:
            raise ConfigError("--sample needs a root, not a URL; pass STEP or --limit")
        rows = _verify_remote(root, step, limit or 1)
    else:
        rows = _verify_files(Path(root), step, limit, sample)
    columns = "step files bytes seconds status reason"
    print_rows("steps", rows, output, columns, empty=f"nothing is committed in {root}")
    raise typer.Exit(PROBLEM_FOUND if any(row.state == "corrupted" for row in rows) else DONE)


def _verify_files(
    root: Path, step: str | None, limit: int | None, sample: str | None
) -> "list[VerifiedStep]":
    from trinity_sync.storage.verify import check_files, choose_files, judge_manifests, judge_steps

    number = None if step is None else resolve_step_argument(root, step)
    corrupted = judge_manifests(require_existing(root), number)
    if corrupted and number is not None:
        return corrupted
    files = choose_files(
        root,
        step=number,
        newest=limit or (1 if step is None and not sample else 0),
        sample=_parse_sample(sample) if sample else 0,
        seed=int(time.time()) // DAY_S,
    )
    with progress_bar("reading") as on_progress:
        checked = check_files(files, on_progress=on_progress)
    return sorted([*judge_steps(checked), *corrupted], key=lambda each: each.step)


def _parse_sample(text: str) -> int | float:
    """Return a number of bytes, or a share as a float."""
    if not text.endswith("%"):
        return parse_size(text)
    from trinity_sync.settings.values import to_share

    try:
        return to_share(text)
    except ValueError:
        why = f"--sample {text} is no percentage; pass one such as 2%, or a size"
        raise ConfigError(why) from None


def _verify_remote(url: str, step: str | None, limit: int) -> "list[VerifiedStep]":
    from trinity_sync.remote.remote_root import Remote
    from trinity_sync.storage.verify import VerifiedStep

    remote = Remote(url)
    if remote.read_identity() is None:
        raise ConfigError(f"no job has sent steps to {url}; check how it is spelled")
    number = None if step in (None, "latest") else parse_number(str(step))
    if step not in (None, "latest") and number is None:
        raise ConfigError(f"{step!r} is neither a number nor latest, and a remote has no tags")
    found = remote.list_steps() if number is None else [remote.read_step(number)]
    manifests = sorted(
        (each.manifest for each in found if each.manifest), key=lambda each: (each.run, each.step)
    )
    rows = [
        VerifiedStep(url, each.step, "corrupted", 0, 0, 0.0, f"{MANIFEST} is torn or was altered")
        for each in found
        if each.state == "corrupted" and not each.manifest
    ]
    if not (manifests or rows):
        step = step or "latest"
        raise with_hint(
            CommitError(f"step {step} is not committed at {remote.url}"), f"trinity-sync ls {url}"
        )
    chosen = manifests[-limit:]
    total = sum(manifest.nbytes for manifest in chosen)
    with progress_bar("reading") as on_progress:
        for manifest in chosen:
            start, wrong = time.perf_counter(), []
            for record in manifest.files:
                why = remote.find_mismatch(manifest.step, record, lambda n: on_progress(n, total))
                if why:
                    wrong.append(f"{record.path} {why}")
            rows.append(
                VerifiedStep(
                    root=url,
                    step=manifest.step,
                    state="corrupted" if wrong else "valid",
                    files=len(manifest.files),
                    nbytes=manifest.nbytes,
                    seconds=time.perf_counter() - start,
                    wrong="; ".join(wrong),
                )
            )
    return sorted(rows, key=lambda each: each.step)
