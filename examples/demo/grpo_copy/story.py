"""The demo's training, on a running stack: train, kill, commit, resume, compare."""

import sys
import time
from pathlib import Path
from typing import cast

import ray
import torch
from rich.console import Console

from grpo_copy import model, report
from grpo_copy.explorer import Explorer
from grpo_copy.recording import Recording
from grpo_copy.run import History, Schedule, repeat, start_explorer, train
from grpo_copy.trainer import EXPLORER, Sync, TrainerGroup
from trinity_sync import Synchronizer
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.manifest import read_run_head

STEPS = 140
KILL_AT = 80
COMMIT_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100_000_000
"""For batches only: weights and checkpoints do not pass through Ray."""

console = Console()
began = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the demo started."""
    console.print(f"[dim]{time.monotonic() - began:5.0f} s[/]  {text}", highlight=False)


def wait_for_commit(root: Path, run: int, step: int) -> float:
    """Wait until a checkpoint is committed; return the seconds that it took.

    Args:
        root: the job's root.
        run: number of the run.
        step: training step.

    Raises:
        TimeoutError: it was not committed in time.
    """
    start = time.monotonic()
    while not ((found := read_run_head(root, run, step)) and found.has_kind("checkpoint")):
        if time.monotonic() - start > COMMIT_TIMEOUT_S:
            raise TimeoutError(f"step {step} was not committed; see its run in the Prefect UI")
        time.sleep(0.05)
    return time.monotonic() - start


def run_job(
    output: Path, root: Path, untrained: Path, recording: Recording, sync: Sync
) -> tuple[History, list]:
    """Train, kill and resume; return the history and the ranks' last fingerprints.

    Args:
        output: folder of the demo.
        root: the job's root.
        untrained: folder of the untrained model.
        recording: records the batches.
        sync: method of the sync.
    """
    history, schedule = History(root), Schedule(sync)
    explorer = start_explorer(untrained, root)
    ranks = TrainerGroup(untrained, root, output)
    say(f"two FSDP2 ranks and an explorer are up; training steps 1 to {KILL_AT}")
    train(ranks, explorer, recording, history, range(1, KILL_AT + 1), schedule)
    killed = ranks.kill()
    ray.kill(explorer)
    say(f"[red]killed[/] ranks {killed} and explorer: step {KILL_AT} was just submitted")
    seconds = wait_for_commit(root, 1, KILL_AT)
    say(f"step {KILL_AT} [green]committed[/] {seconds:.1f} s after its trainer died")

    ranks = TrainerGroup(untrained, root, output)
    committed = find_newest(root)
    assert committed is not None
    state = ranks.load(committed.step)
    explorer = start_explorer(untrained, root, state)
    say(f"a new run resumed from step {committed.step}; training to step {STEPS}")
    say(f"its explorer continues from {EXPLORER}, {len(state):,} bytes of that step")
    train(ranks, explorer, recording, history, range(committed.step + 1, STEPS + 1), schedule)
    fingerprints = ranks.fingerprints()
    ranks.close()
    history.find_commits()
    ray.kill(explorer)
    say(f"trained to step {STEPS}, all saves committed; {describe_rewards(history)}")
    lag = sum(history.lags.values()) / len(history.lags)
    say(f"sync by {sync}: the explorer sampled with weights that were {lag:.1f} steps old")
    return history, fingerprints


def compare(
    output: Path,
    root: Path,
    history: History,
    fingerprints: list,
    untrained: Path,
    recording: Recording,
) -> bool:
    """Repeat all steps without interruption; return whether the results are bit-equal.

    Args:
        output: folder of the demo.
        root: the job's root.
        history: history of the interrupted job.
        fingerprints: last fingerprints of its ranks.
        untrained: folder of the untrained model.
        recording: the recorded batches.
    """
    ranks = TrainerGroup(untrained, output / "repetition", output)
    losses = repeat(ranks, recording, range(1, STEPS + 1))
    repeated = ranks.fingerprints()
    ranks.close()
    say(f"repeated all {STEPS} steps without interruption, on the recorded batches:")
    same = {
        "prompts of all steps": compare_prompts(untrained, root, recording),
        "losses of all steps": losses == history.losses,
    }
    for part in fingerprints[0]:
        same[part] = [rank[part] for rank in fingerprints] == [rank[part] for rank in repeated]
    for part, equal in same.items():
        say(f"  {part}: " + ("[green]equal to the last bit[/]" if equal else "[red]different[/]"))
    return all(same.values())


def compare_prompts(untrained: Path, root: Path, recording: Recording) -> bool:
    """Return whether an uninterrupted explorer draws the same prompts, whatever its weights.

    Args:
        untrained: folder of the untrained model.
        root: the job's root.
        recording: the recorded batches.
    """
    explorer = Explorer(untrained, root)
    drawn = [explorer.sample()[0].prompts for _ in range(STEPS)]
    recorded = [recording.read(step).prompts for step in range(1, STEPS + 1)]
    return torch.equal(torch.stack(drawn), torch.stack(recorded))


def describe_rewards(history: History) -> str:
    """Return the mean reward of the first and the last ten steps."""
    first = sum(history.rewards[step] for step in range(1, 11)) / 10
    last = sum(history.rewards[step] for step in range(STEPS - 9, STEPS + 1)) / 10
    return f"mean reward {first:.2f} in the first ten steps, {last:.2f} in the last ten"


def run(output: Path, sync: Sync = "checkpoint") -> bool:
    """Run the demo; return whether the results are bit-equal.

    Args:
        output: folder of the demo.
        sync: method of the sync.
    """
    ray.init(  # the training's own cluster, independent of the stack's
        "local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )
    # a new name each time, since the root is the identity of a job
    root = output / f"job-{time.strftime('%H%M%S')}"
    untrained = model.create_model(output / "model")
    recording = Recording(output / "batches")
    synchronizer = Synchronizer.get_actor(root=root)
    history, fingerprints = run_job(output, root, untrained, recording, sync)
    same = compare(output, root, history, fingerprints, untrained, recording)
    console.print(report.make_save_table(history))
    report.plot(history, KILL_AT, output / "demo.png")
    say(f"plot: {output / 'demo.png'}")
    ray.kill(synchronizer)
    ray.shutdown()
    return same


if __name__ == "__main__":
    try:
        sys.exit(0 if run(Path(sys.argv[1]), cast(Sync, sys.argv[2])) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
