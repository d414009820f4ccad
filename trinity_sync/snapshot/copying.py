"""Copies of many tensors at memcpy speed, also while the cores are busy with training.

A parallel ``Tensor.copy_`` meets its threads at a barrier for every tensor, which costs a state of
hundreds of tensors several times the copy as soon as one thread has to wait for its core. Here each
thread takes the next piece until none is left, and they meet once.
"""

import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

PIECE = 4 << 20


Computed = Mapping[torch.device, torch.Event]
"""For each GPU, the event at which what is to be copied is computed."""


def computed_now(storages: Iterable[torch.UntypedStorage]) -> Computed:
    """What the current streams of the storages' GPUs have been given to compute until now."""
    devices = {storage.device for storage in storages if storage.device.type != "cpu"}
    return {device: torch.accelerator.current_stream(device).record_event() for device in devices}


def copy_into(
    image: torch.Tensor,
    parts: Iterable[tuple[int, torch.Tensor]],
    *,
    computed: Computed | None = None,
    threads: int = 0,
) -> None:
    """Copy each part, a contiguous ``uint8`` tensor, to its offset in ``image``, one on the CPU.

    Args:
        image: where to, on the CPU.
        parts: offsets and what belongs there. Parts on a GPU are copied on a stream of their own,
            and waited for once, at the end.
        computed: when that stream may begin; by default after what the current stream was given.
        threads: how many copy parts on the CPU; 0 for as many as torch uses for one operation.
    """
    pieces: deque[tuple[np.ndarray, np.ndarray]] = deque()
    streams: dict[torch.device, torch.Stream] = {}
    memory = image.numpy()
    for offset, part in parts:
        if part.device.type != "cpu":
            if part.device not in streams:
                streams[part.device] = torch.Stream(part.device)
                known = computed or computed_now([part.untyped_storage()])
                streams[part.device].wait_event(known[part.device])
            with streams[part.device]:
                image[offset : offset + len(part)].copy_(part, non_blocking=True)
            continue
        source = part.numpy()
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            pieces.append((memory[offset + start : offset + start + len(piece)], piece))
    helpers = min((threads or torch.get_num_threads()) - 1, len(pieces) - 1)
    running = [_pool().submit(_copy_until_empty, pieces) for _ in range(helpers)]
    _copy_until_empty(pieces)
    for helper in running:
        helper.result()
    for stream in streams.values():
        stream.synchronize()


def _copy_until_empty(pieces: "deque[tuple[np.ndarray, np.ndarray]]") -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(target, source)  # lets other Python threads run meanwhile


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="staging")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
