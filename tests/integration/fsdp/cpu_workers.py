"""veRL's training worker on the CPU, with a small language model in place of what is configured."""

import hashlib
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
ENVIRONMENT = {
    "PYTHONPATH": f"{EXAMPLES}:{Path(__file__).parent}:{EXAMPLES.parent}",
    "VERL_PLATFORM": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""What the processes of Ray need to find this module, and to do without a GPU."""

sys.path.insert(0, str(EXAMPLES))
os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"})

from grpo_copy.cpu_platform import use_cpu  # noqa: E402

use_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402


class OnCPU(TrainingWorker):
    """One rank of one role."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        if not dist.is_initialized():  # veRL asks for gloo twice where the device is the CPU
            dist.init_process_group("gloo")
        precision = {f"{what}_dtype": "fp32" for what in ("param", "reduce", "buffer")}
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=model,
                    use_remove_padding=False,
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "sdpa"},
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    use_remove_padding=False,
                    use_torch_compile=False,
                    use_dynamic_bsz=False,
                    mixed_precision=precision,
                ),
                optimizer_config=FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=10),
                checkpoint_config=CheckpointConfig(),
            )
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self) -> None:
        """Take an optimizer step with gradients drawn at random."""
        for parameter in self.engine.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.engine.optimizer.step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> str:
        """SHA-256 of this rank's weights and optimizer moments."""
        seen = hashlib.sha256()
        states = self.engine.optimizer.state.values()
        for tensor in [*self.engine.module.parameters(), *(each["exp_avg"] for each in states)]:
            seen.update(tensor.detach().to_local().numpy().tobytes())
        return seen.hexdigest()
