"""Report of the demo: a table of all saves and a plot of the run."""

from pathlib import Path

from rich.table import Table

from grpo_copy.run import History
from trinity_sync.layout import KINDS


def make_save_table(history: History) -> Table:
    """Return a table of all submitted saves and syncs, and their states."""
    table = Table(title="Saves and syncs")
    for column in ("step", "kind", "bytes", "stall ms", "commit ms", "state"):
        table.add_column(column, justify="left" if column in ("kind", "state") else "right")
    for save in history.saves:
        commit_s = history.commit_s.get((save.step, save.kind))
        missing = "[red]not committed" if save.kind in KINDS else "sent, not saved"
        table.add_row(
            str(save.step),
            save.kind,
            f"{save.nbytes:,}",
            f"{1e3 * save.stall_s:.1f}",
            "" if commit_s is None else f"{1e3 * commit_s:.0f}",
            "committed" if commit_s is not None else missing,
        )
    return table


def plot(history: History, killed_at: int, path: Path) -> None:
    """Plot reward and stall of each step, as a PNG.

    Args:
        history: history of the job.
        killed_at: step after which the ranks were killed.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    steps = sorted(history.rewards)
    above.plot(steps, [history.rewards[step] for step in steps])
    above.set(ylabel="reward", ylim=(0, 1), title="GRPO with veRL's FSDP2 engine on CPU")
    for kind in sorted({save.kind for save in history.saves}):
        saves = [save for save in history.saves if save.kind == kind]
        below.plot([s.step for s in saves], [1e3 * s.stall_s for s in saves], "o", label=kind)
    below.set(ylabel="stall of training, ms", xlabel="step")
    below.set_ylim(bottom=0)
    below.legend()
    for axes in (above, below):
        axes.axvline(killed_at, color="red", linestyle=":")
    above.annotate("ranks and explorer killed", (killed_at, 0.05), color="red")
    figure.savefig(path, dpi=120)
    plt.close(figure)
