"""What the demo shows at its end: a table of all saves and a picture of the run."""

from pathlib import Path

from rich.table import Table

from grpo_copy.run import History
from trinity_sync.layout import KINDS


def table_of_saves(history: History) -> Table:
    """Every save and sync that was handed over, and what became of it."""
    table = Table(title="Saves and syncs, as the training loop saw them")
    for column in ("step", "kind", "bytes", "stall ms", "commit ms", "state"):
        table.add_column(column, justify="left" if column in ("kind", "state") else "right")
    for save in history.saves:
        commit_s = history.commit_s.get((save.step, save.kind))
        lost = "[red]not committed" if save.kind in KINDS else "sent, not saved"
        table.add_row(
            str(save.step),
            save.kind,
            f"{save.nbytes:,}",
            f"{1e3 * save.stall_s:.1f}",
            "" if commit_s is None else f"{1e3 * commit_s:.0f}",
            "committed" if commit_s is not None else lost,
        )
    return table


def draw(history: History, killed_at: int, picture: Path) -> None:
    """Reward and stall over the steps, as a PNG."""
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
    below.set(ylabel="stall of the training, ms", xlabel="step")
    below.set_ylim(bottom=0)
    below.legend()
    for axes in (above, below):
        axes.axvline(killed_at, color="red", linestyle=":")
    above.annotate("ranks and explorer killed", (killed_at, 0.05), color="red")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
