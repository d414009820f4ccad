"""The queue of finished rollouts: TransferQueue's own controller and storage, in one process.

They are Ray actors for their start alone and talk over ZeroMQ, so their classes need no Ray.
"""

import pickle
import shutil
import time
from importlib import resources
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.interface import _maybe_create_tq_client
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from tests.environments.whole_run.run import BEHIND_S, ROLES, Run, is_behind
from tests.environments.whole_run.task import Rollout
from trinity_sync import Participant

CONFIG, PARTITION, READY = "queue.config", "rollouts", "ready"


class RolloutQueue:
    """A client of the queue, in any process of the run."""

    def __init__(self, run: Run) -> None:
        run.ask("queue")
        _maybe_create_tq_client(pickle.loads((run.own / CONFIG).read_bytes()))

    def put(self, number: int, rollout: Rollout) -> None:
        # the queue knows the key before it has the data; the tag comes last
        transfer_queue.kv_put(str(number), PARTITION, rollout, tag={READY: True})

    def list_ready(self) -> list[int]:
        found = transfer_queue.kv_list(PARTITION).get(PARTITION, {})
        return [int(key) for key, tags in found.items() if tags.get(READY)]

    def get(self, ids: list[int]) -> Rollout:
        found: Any = transfer_queue.kv_batch_get([str(number) for number in ids], PARTITION)
        return {name: torch.stack(list(values)) for name, values in found.items()}

    def remove(self, ids: list[int]) -> None:
        if ids:
            transfer_queue.kv_clear([str(number) for number in ids], PARTITION)


def start(run: Run) -> TransferQueueClient:
    """Start the queue in this process; clients find it by the run."""
    defaults = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    config = OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults)
    storage = config.backend.SimpleStorage
    servers = [
        TransferQueueController.__ray_metadata__.modified_class(),
        SimpleStorageUnit.__ray_metadata__.modified_class(dict(storage)),
    ]
    config.controller.zmq_info, unit = (each.zmq_server_info for each in servers)
    storage.zmq_info = {unit.id: unit}
    client = _maybe_create_tq_client(config)
    _kept.extend(servers)
    (run.own / CONFIG).write_bytes(pickle.dumps(config))
    return client


_kept: list[Any] = []
"""Servers, which end with their objects."""


def serve(run: Run) -> None:
    """Serve the queue, beginning with what it held at the step, and save it at each cut."""
    client = start(run)
    with Participant(run.root, role="queue", roles=ROLES, run_key=run.key) as part:
        if (step := part.latest_step()) is not None:
            part.load(step)
            part.restore_folder(step, "rollouts", restored := run.own / "restored")
            client.load_storage_checkpoint(str(restored))
            client.load_controller_checkpoint(str(restored / "controller.pkl"))
        run.tell("queue")
        while True:
            if (step := part.wait_cut(timeout_s=1)) is not None:
                if is_behind("queue", step):
                    time.sleep(BEHIND_S)  # what is put now is not in the ledger's state
                (folder := run.own / f"cut-{step}").mkdir()
                # in this order, the storage has all that the controller knows
                client.save_controller_checkpoint(str(folder / "controller.pkl"))
                client.save_storage_checkpoint(str(folder))
                part.save(step, None, folders={"rollouts": folder})
                shutil.rmtree(folder)
