"""The trained state that every system saves: a Qwen2 under FSDP2 with Adam.

Sizes are those of the whole state, as checkpoints know it: four tensors a parameter (the weight,
``exp_avg``, ``exp_avg_sq`` and ``step``) and twelve bytes a number.
"""

import mmap
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

State = dict[str, Any]

VOCABULARY = 1024
TOKENS = 32
"""Tokens of one step: few, because a long step would hide what a save takes from the training."""


@dataclass(frozen=True)
class Size:
    """Bytes and tensors of the whole state, over all ranks, and the ranks that share it."""

    nbytes: int
    tensors: int
    ranks: int = 1


def _detached(model: Any) -> State:
    return dict(model.state_dict())


class Training:
    """Model, optimizer and schedule of one rank of an initialized process group.

    ``size`` is met within a percent. ``shared`` is in shared memory, for the systems that need it.
    Unless ``begun``, no first step is taken, before which the optimizer has no state.
    """

    def __init__(self, size: Size, shared: Path, *, begun: bool = True, cores: int = 1) -> None:
        torch.manual_seed(0)
        self._cores = cores
        self.size, self.shared = size, shared
        self.rank = dist.get_rank()
        self.model: Any = Qwen2ForCausalLM(_config(size))
        mesh = init_device_mesh("cpu", (size.ranks,), mesh_dim_names=("fsdp",))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _decay)
        if begun:
            self.step()

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        """Train on random tokens; ``before_update`` runs before the optimizer's step.

        By default it computes on one core, so that a save finds another, as next to a GPU. With all
        cores the threads of every small operation wait for each other whenever one loses its core.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(self._cores)
        tokens = torch.randint(VOCABULARY, (1, TOKENS))
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        torch.set_num_threads(threads)

    def state(self, of_model: Callable[[Any], State] = _detached) -> State:
        """Return the three components that veRL saves; their tensors alias the live ones.

        ``of_model`` collects those of the model, for a system with another way.
        """
        rng = {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }
        return {
            "model": of_model(self.model),
            "optim": self.optimizer.state_dict(),
            "extra_state": {"lr_scheduler": self.schedule.state_dict(), "rng": rng},
        }

    def resume(self, components: Iterable[tuple[str, Any]]) -> None:
        """Load states, one after the other, as veRL's manager does."""
        for component, state in components:
            if component == "model":
                self.model.load_state_dict(state)
            elif component == "optim":
                self.optimizer.load_state_dict(state)
            elif component == "extra_state":
                self.schedule.load_state_dict(state["lr_scheduler"])
                torch.set_rng_state(state["rng"]["cpu"])
                np.random.set_state(state["rng"]["numpy"])
                random.setstate(state["rng"]["random"])

    def touch(self) -> None:
        """Read a byte of every page, so that no page is loaded at its first use."""
        state = self.state()
        of_optimizer = state["optim"]["state"].values()
        for tensor in chain(state["model"].values(), *(each.values() for each in of_optimizer)):
            _bytes(tensor)[:: mmap.PAGESIZE].sum()

    def digest(self) -> str:
        """Return a digest of this rank's live tensors, bit by bit, and of the other values."""
        digest = xxhash.xxh3_128()

        def visit(value: Any) -> None:
            if isinstance(value, dict):
                for key in value:
                    digest.update(repr(key).encode())
                    visit(value[key])
            elif isinstance(value, list | tuple):
                for item in value:
                    visit(item)
            elif isinstance(value, torch.Tensor):
                digest.update(_bytes(value).numpy().data)
            elif isinstance(value, np.ndarray):
                digest.update(value.tobytes())
            else:
                digest.update(repr(value).encode())

        visit(self.state())
        return str(digest.hexdigest())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of this rank's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8)


def _decay(step: int) -> float:
    return 1 / (1 + step / 100)


def _config(size: Size) -> Qwen2Config:
    """Derive width and depth from the size: twelve parameters a layer, and three more."""
    layers = max(1, round((size.tensors / 4 - 3) / 12))
    numbers = size.nbytes / 12
    hidden = 32
    while _numbers(hidden + 32, 4 * (hidden + 32), layers) < numbers:
        hidden += 32
    rest = numbers - _numbers(hidden, 0, layers)
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=round(rest / (3 * hidden * layers)),
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )


def _numbers(hidden: int, intermediate: int, layers: int) -> int:
    """Return the number of elements of a Qwen2's parameters."""
    layer = 4 * hidden**2 + 3 * hidden * intermediate + 5 * hidden
    return layers * layer + 2 * VOCABULARY * hidden + hidden
