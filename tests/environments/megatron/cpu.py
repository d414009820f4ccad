"""Megatron on the CPU: what it asks of CUDA without need is answered by the CPU here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Makes tensors for ``device="cuda"`` on the CPU, and calls the types of tensors CUDA's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron run on the CPU in this process; what is replaced stays so."""
    from megatron.core.tensor_parallel import random

    @contextmanager
    def fork(*_: Any) -> Iterator[None]:
        yield

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign,assignment]
    random.CudaRNGStatesTracker.fork = fork
    with OnCpu():
        yield
