"""Weights of TRL's `GRPOTrainer` and `RLOOTrainer` for their vLLM server, in the place of NCCL.

TRL brings the server to the weights of a step before it generates (``vllm_mode="server"``). The
mixin replaces the two calls that need NCCL: nothing joins a communicator, and a sync publishes the
weights by `TrinitySyncCallback`, then makes the server load them. Generation stays TRL's.
"""

from typing import Any

from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.integrations.huggingface import TrinitySyncCallback
from trinity_sync.integrations.huggingface_state import is_adapted
from trinity_sync.integrations.import_hooks import replace_attributes
from trinity_sync.integrations.vllm import VLLMUpdater
from trinity_sync.integrations.vllm.plugin import BACKEND

with from_extra("trl"):
    from trl.generation.vllm_client import VLLMClient


class VLLMSyncMixin:
    """Mixin for trainers of TRL that generate with a vLLM server.

    One of the trainer's callbacks is a `TrinitySyncCallback`. The server runs on the trainer's
    node, with ``VLLM_SERVER_DEV_MODE=1`` and
    ``--weight-transfer-config '{"backend": "trinity_sync"}'``.

    Example::

        class Trainer(VLLMSyncMixin, GRPOTrainer):
            pass

        saves = TrinitySyncCallback("ckpts")
        arguments = GRPOConfig(use_vllm=True, vllm_mode="server", ...)
        trainer = Trainer(model, reward, arguments, callbacks=[saves], ...)
        trainer.train(resume_from_checkpoint=saves.latest())

    Raises:
        ConfigError: the trainer has no vLLM server or no `TrinitySyncCallback`, several processes
            or an adapter, or the server was started with another back end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replace_attributes(VLLMClient, init_communicator=_require_backend):
            super().__init__(*args, **kwargs)
        trainer: Any = self
        if not trainer.use_vllm or trainer.vllm_mode != "server":
            raise ConfigError("weights go to a vLLM server; set use_vllm and vllm_mode='server'")
        callbacks = trainer.callback_handler.callbacks
        saves = [each for each in callbacks if isinstance(each, TrinitySyncCallback)]
        if not saves:
            raise ConfigError("weights are published by a TrinitySyncCallback; add it to callbacks")
        if trainer.args.world_size > 1 or is_adapted(trainer.model):
            raise ConfigError(
                "the mixin sends the weights of one process and of a whole model; leave it out for "
                "several processes or an adapter (PEFT)"
            )
        generation = trainer.vllm_generation
        updater = VLLMUpdater(generation.vllm_client.base_url, saves[0].root)

        def sync_weights() -> None:
            step = trainer.state.global_step
            saves[0].upload(step, trainer.model)
            updater.update(min_step=step)

        generation.sync_weights = sync_weights


def _require_backend(client: Any, device: Any = None) -> None:
    """Look at the server's back end, where TRL's client would join NCCL's communicator."""
    config = client.get_server_info()["weight_transfer_config"] or {}
    if (found := config.get("backend")) != BACKEND:
        raise ConfigError(
            f"the vLLM server at {client.base_url} has the weight transfer {found}; start it with "
            f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
