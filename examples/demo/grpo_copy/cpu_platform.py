"""veRL on CPU: the platform plugin that tells veRL's engine to use ``cpu`` and gloo.

veRL 0.9 supports CUDA, ROCm and Ascend, and treats a machine without any of them as a CUDA machine.
Its plugin interface is enough to train on CPU, so veRL is not patched.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The device ``cpu``, without streams, memory pools or profiler."""

    @property
    def device_name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """``cpu``: no vendor to tell apart."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """``torch.cpu``, which has the same calls as ``torch.cuda`` where they make sense."""
        return torch.cpu

    def is_available(self) -> bool:
        """False: there is no accelerator whose generator veRL would have to restore."""
        return False

    def current_device(self) -> Any:
        """``torch.device("cpu")``: torch reads a bare index as a CUDA device."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One device."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the CPU allocator has no such settings."""

    def empty_cache(self) -> None:
        """Do nothing: the CPU allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """No compute capability."""
        return (None, None)

    def communication_backend_name(self) -> str:
        """``gloo``."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """CUDA's variable, which hides nothing here."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """``CPU``."""
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Ask Ray for CPUs instead of GPUs."""
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        """No variables."""
        return []

    def is_ipc_supported(self) -> bool:
        """Device IPC does not apply."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""


def use_cpu() -> None:
    """Make veRL use the CPU in this process; call it before importing veRL's engine."""
    os.environ["VERL_PLATFORM"] = "cpu"  # for processes that veRL itself starts
    set_platform(PlatformCPU())
