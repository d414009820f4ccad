"""Start veRL's SFT trainer as its users do, on two ranks of this machine's CPU.

With ``STRATEGY=veomni`` its engine is VeOmni's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import left_of

REPOSITORY = Path(__file__).parents[3]
IMPORTS = [str(REPOSITORY), *(str(REPOSITORY / "examples" / each) for each in ("demo", "verl"))]
BATCH = 4
ENGINE = [
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=False",
    *(f"+engine.mixed_precision.{what}_dtype=fp32" for what in ("param", "reduce")),
]
if os.environ.get("STRATEGY") == "veomni":
    ENGINE = ["engine=veomni", "optim=veomni", "engine.attn_implementation=sdpa"]
    ENGINE += ["engine.moe_implementation=eager"]
ALONE = "tests.environments.verl.cpu"
WITH_US = "tests.environments.verl.cpu,trinity_sync.integrations.verl.switch"
Losses = dict[int, tuple[float, float, float]]
"""Loss, norm of the gradient and learning rate by step."""


def make_world(folder: Path) -> None:
    """Write a random Qwen2 of two layers, its tokenizer, and twenty conversations."""
    from tiny import main

    main(folder)


class Program:
    """One start of a program; its output is in ``<name>.log``, what it logs in ``<name>.jsonl``."""

    def __init__(self, world: Path, name: str, modules: str) -> None:
        self._world = world
        self._log, self._logged = world / f"{name}.log", world / f"{name}.jsonl"
        self._command: list[str] = []
        self._environment = os.environ | {
            "VERL_USE_EXTERNAL_MODULES": modules,
            "PYTHONPATH": os.pathsep.join(IMPORTS),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The program within the block; what is left of it afterwards is killed."""
        with self._log.open("wb") as log:
            program = subprocess.Popen(
                self._command,
                cwd=self._world,  # where Hydra leaves its notes
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield program
        finally:
            kill(program)

    def to_its_end(self) -> None:
        with self.running() as program:
            status = program.wait()
        assert status == 0, self.output[-6000:]

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The lines that were logged up to now."""
        if not self._logged.exists():
            return []
        lines = self._logged.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Launch(Program):
    """One start of ``torchrun -m verl.trainer.sft_trainer``."""

    def __init__(
        self, world: Path, name: str, root: Path, modules: str, *more: str, ranks: int = 2
    ) -> None:
        super().__init__(world, name, modules)
        self._environment["VERL_FILE_LOGGER_PATH"] = str(self._logged)
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={ranks}", "-m", "verl.trainer.sft_trainer"),
            f"data.train_files={world}/train.parquet",
            *(f"data.train_batch_size={BATCH}", "data.micro_batch_size_per_gpu=1"),
            *("data.use_dynamic_bsz=False", "data.num_workers=0", "data.max_length=32"),
            f"model.path={world}/model",
            *("model.use_remove_padding=False", "model.enable_gradient_checkpointing=False"),
            "+model.override_config.attn_implementation=sdpa",
            *ENGINE,
            *("optim.lr=1e-3", "optim.lr_warmup_steps=12"),
            *("trainer.device=cpu", "trainer.logger=[file]"),
            f"trainer.default_local_dir={root}",
            *more,
        ]

    @property
    def losses(self) -> Losses:
        """What was logged up to now."""
        names = ("train/loss", "train/grad_norm", "train/lr")
        return {each["step"]: tuple(each["data"][name] for name in names) for each in self.logged}


def kill(program: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a program, and for what it has started, some of it in sessions of its own."""
    below = psutil.Process(program.pid).children(recursive=True) if program.poll() is None else []
    program.kill()
    program.wait()
    for process in left_of(below):
        with suppress(psutil.NoSuchProcess):
            process.kill()
