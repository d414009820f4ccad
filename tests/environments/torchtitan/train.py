"""TorchTitan's own trainer on the CPU: ``python -m tests.environments.torchtitan.train``.

TorchTitan takes a machine without an accelerator for one with CUDA, asks a device for its name and
memory, and reduces gradients in a way that gloo does not know. Stand-ins answer, before TorchTitan
is imported; everything else is its own.
"""

import types

import torch
import torch._utils
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

MEMORY = types.SimpleNamespace(total_memory=1 << 30)

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: MEMORY
torch.cpu.current_device = lambda: 0
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = lambda: None
torch.cpu.empty_cache = lambda: None
torch.distributed.set_timeout = _set_pg_timeout  # its name in torch 2.13
divide = FSDPModule.set_gradient_divide_factor


def sum_gradients(module: FSDPModule, factor: float) -> None:
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = sum_gradients

if __name__ == "__main__":
    torch.set_num_threads(1)
    from torchtitan.train import main

    main()
