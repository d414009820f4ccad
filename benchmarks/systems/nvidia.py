"""NVIDIA's ``nvidia-resiliency-ext``: listed, as it cannot save a state that lies on the CPU.

Its ``TorchAsyncCheckpoint.async_save`` and ``FileSystemWriterAsync`` stage with
``tensor.to("cpu")`` and ``torch.cuda.synchronize()``. Without CUDA the second raises; and the first
copies nothing of a tensor that is on the CPU already, so its writer process would get live tensors.
The package is not among the extras of the bench: it brings a ``pynvml`` that makes every import of
torch warn.
"""

import importlib

from benchmarks.systems.base import System

MODULE = "nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt"


class NvidiaResiliency(System):
    """A system that is not run."""

    name = "nvidia-resiliency-ext"

    @classmethod
    def unavailable(cls) -> str:
        """Return its own error, or that it is not installed."""
        try:
            peer = importlib.import_module(MODULE)
            peer.TorchAsyncCheckpoint(persistent_queue=True).async_save({}, "/dev/null")
        except ImportError:
            return "needs CUDA; not installed"
        except AssertionError as error:
            return f"needs CUDA: {error}"
        return "stages GPU tensors only; this state lies on the CPU"
