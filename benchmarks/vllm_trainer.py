"""The trainer of ``benchmarks.vllm_updates``: a process of its own that sends versions by each way.

Each version is new in every tensor, and transformers says what the first token is with it.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_table import COMMIT, OURS

PROMPT = [5, 6, 7]
LIKELY = 3
"""The engine's token has to be among so many of the likeliest: bf16 is rounded elsewhere there."""
WITHOUT_NUMPY = {torch.bfloat16: torch.int16}
"""dtypes that NumPy does not have, and those used instead."""

SMOLLM_UNTIED = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""SmolLM2-135M with a head of its own. vLLM on the CPU packs the head; where it is tied, a reload
from files, which have tied tensors once, leaves the old one."""
TINY = {
    "vocab_size": 64,
    "hidden_size": 128,  # four heads of 32: vLLM on the CPU takes no smaller ones
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A model, in the dtype of trainer and engine."""

    name: str
    kind: str
    """Name of transformers' class of the configuration."""
    config: dict[str, Any]
    dtype: str = "float32"

    def make_model(self) -> Any:
        """Return the model, with random weights."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.kind)(**self.config)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, self.dtype)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms of 1 would stay as they are
                    parameter.normal_()
        return model.eval()


CASES = (
    Case("tiny", "Qwen2Config", TINY),
    Case("163M, fp32", "LlamaConfig", SMOLLM_UNTIED),
    Case("163M, bf16", "LlamaConfig", SMOLLM_UNTIED, "bfloat16"),
)


@dataclass(frozen=True)
class Places:
    """Where versions are written."""

    root: Path
    disk: Path
    memory: Path


@dataclass(frozen=True)
class Sent:
    """A version that the trainer has sent."""

    began: float
    """Seconds of `time.perf_counter`, which all processes of the machine share."""
    stall_s: float
    nbytes: int
    """Bytes that were written: into shared memory, a file or the object store."""


class Book:
    """An actor that holds the newest version in Ray's object store."""

    def __init__(self) -> None:
        self._refs: list[Any] = []

    def hold(self, refs: list[Any]) -> None:
        """Hold a version instead of the one before."""
        self._refs = refs

    def held(self) -> list[Any]:
        """Return the version."""
        return self._refs


class Trainer:
    """Holds the model, and sends its weights."""

    def __init__(self, case: Case, places: Places, with_ray: bool) -> None:
        from trinity_sync import CheckpointCoordinator

        torch.set_num_threads(os.cpu_count() or 1)
        self._places = places
        self._model = case.make_model()
        self._spare = [parameter.detach().clone() for parameter in self._model.parameters()]
        self.nbytes = sum(each.nbytes for each in self._spare)
        self.tensors = len(self._spare)
        self._saves = CheckpointCoordinator(places.root)
        self._book = _start_ray(3 * self.nbytes + (256 << 20)) if with_ray else None
        self._ways: dict[str, Callable[[int], int]] = {
            OURS: self._upload,
            COMMIT: self._commit,
            "files, fsync": lambda step: self._write(places.disk, step, durable=True),
            "files": lambda step: self._write(places.disk, step),
            "files in memory": lambda step: self._write(places.memory, step),
            "Ray, tensors": lambda _: self._put(self._tensors()),
            "Ray, arrays": lambda _: self._put(_to_arrays(self._tensors())),
        }

    def save_model(self, folder: Path) -> None:
        """Write the model that the engine starts with."""
        self._model.save_pretrained(folder)

    def prepare(self) -> list[int]:
        """Change all weights; return the likeliest first tokens."""
        for folder in (self._places.disk, self._places.memory):
            for old in folder.iterdir():
                shutil.rmtree(old)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.flatten().roll(1).view_as(parameter))
            logits = self._model(torch.tensor([PROMPT])).logits[0, -1]
        return logits.topk(LIKELY).indices.tolist()

    def send(self, way: str, step: int) -> Sent:
        """Send the weights as they are."""
        began = time.perf_counter()
        nbytes = self._ways[way](step)
        return Sent(began, time.perf_counter() - began, nbytes)

    def copy_once(self) -> float:
        """Return the seconds that a warm copy of the model takes, on all cores."""
        from trinity_sync.tensors.memcpy import copy_pieces

        pairs = zip(self._spare, self._model.parameters(), strict=True)
        pieces = [(to.data_ptr(), of.data_ptr(), to.nbytes) for to, of in pairs]
        began = time.perf_counter()
        copy_pieces(pieces)
        return time.perf_counter() - began

    def wait_committed(self) -> None:
        """Wait until what was sent is committed."""
        self._saves.wait_all(120)

    def close(self) -> None:
        """Release what the trainer holds."""
        self._saves.close()
        if self._book:
            import ray

            ray.shutdown()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, tied ones once."""
        return {name: tensor.detach() for name, tensor in self._model.named_parameters()}

    def _upload(self, step: int) -> int:
        tag, _ = self._saves.upload(step, self._model.state_dict)
        if tag is None:
            self._saves.wait_all()  # raises why
            raise RuntimeError(f"step {step} was not published")
        return tag.nbytes

    def _commit(self, step: int) -> int:
        self._saves.save(step, {"model": self._model.state_dict()}, kind="state_dict")
        return 2 * self.nbytes  # shared memory, and the file

    def _write(self, folder: Path, step: int, *, durable: bool = False) -> int:
        from safetensors.torch import save_file

        path = folder / str(step) / "model.safetensors"
        path.parent.mkdir()
        save_file(self._tensors(), path)
        if durable:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return path.stat().st_size

    def _put(self, state: dict[str, Any]) -> int:
        import ray

        assert self._book is not None
        ray.get(self._book.hold.remote([ray.put(state)]))
        return self.nbytes


def _to_arrays(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: tensor.view(WITHOUT_NUMPY.get(tensor.dtype, tensor.dtype)).numpy()
        for name, tensor in state.items()
    }


def _start_ray(store_bytes: int) -> Any:
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
    )
    return ray.remote(num_cpus=0)(Book).options(name="book", namespace="bench").remote()


def run_trainer(pipe: Any, case: Case, places: Places, with_ray: bool) -> None:
    """Call the methods that the pipe names, with their arguments, until None."""
    trainer = Trainer(case, places, with_ray)
    address = None
    if with_ray:
        import ray

        address = ray.get_runtime_context().gcs_address
    pipe.send((trainer.nbytes, trainer.tensors, address))
    while (command := pipe.recv()) is not None:
        name, *arguments = command
        pipe.send(getattr(trainer, name)(*arguments))
    trainer.close()
