"""Copies of many tensors at memcpy speed, also while the cores are busy with training.

A parallel ``Tensor.copy_`` meets its threads at a barrier for every tensor, which costs a state of
hundreds of tensors several times the copy as soon as one thread has to wait for its core. Here each
thread takes the next piece until none is left, and they meet once.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch

from trinity_sync.errors import ImageError

PIECE = 4 << 20
SMALL = 32 << 10

Piece = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""
Copy = Callable[[int, int, int], object]
"""Copies one."""


Computed = Mapping[torch.device, torch.Event]
"""For each GPU, the event at which what is to be copied is computed."""


def computed_now(storages: Iterable[torch.UntypedStorage]) -> Computed:
    """What the current streams of the storages' GPUs have been given to compute until now."""
    return {
        device: torch.accelerator.current_stream(device).record_event()
        for device in {storage.device for storage in storages}
        if device.type != "cpu"
    }


def on_device(computed: Computed) -> AbstractContextManager[object]:
    """Let this thread work on the GPU that holds what is to be copied.

    A new thread's GPU is the first one, on which CUDA would make a context of hundreds of MB.
    """
    gpus = [device for device in computed if device.type == "cuda"]
    return torch.cuda.device(gpus[0]) if gpus else nullcontext()


@cache
def staging_stream(device: torch.device) -> torch.Stream:
    """The stream on which a GPU's storages are copied, the same one for good.

    torch gives some 32 streams out in turn, so further ones would be those of collectives.
    """
    return torch.Stream(device)


def copy_into(
    image: torch.Tensor,
    parts: Sequence[tuple[int, int, torch.UntypedStorage]],
    *,
    computed: Computed | None = None,
    threads: int = 0,
    file: int | None = None,
) -> None:
    """Copy each storage to its offset in ``image``.

    Args:
        image: ``uint8`` tensor on the CPU that has room for all of them.
        parts: offsets, bytes, and what belongs there. Storages on a GPU are copied on a stream of
            their own, and waited for once, at the end.
        computed: when that stream may begin; by default after what the current stream was given.
        threads: how many copy storages on the CPU; 0 for as many as torch uses for one operation.
        file: descriptor of the file that ``image`` maps. Given it, storages on the CPU may be freed
            or resized meanwhile by others: the kernel reads them then, for which memory that is
            gone is an error and no crash. It takes about twice the time.

    Raises:
        ImageError: with ``file``, the memory of a storage is gone.
    """
    pieces: deque[Piece] = deque()
    small: list[Piece] = []
    streams = set[torch.Stream]()
    base = image.data_ptr()
    if computed is None:
        computed = computed_now(storage for *_, storage in parts)
    copy = _copy if file is None else _writing_to(file, base)
    try:
        for offset, nbytes, storage in parts:
            if computed and (device := storage.device) in computed:
                stream = staging_stream(device)
                if stream not in streams:
                    stream.wait_event(computed[device])
                    streams.add(stream)
                with stream:
                    target = image[offset : offset + nbytes]
                    target.copy_(bytes_of(storage), non_blocking=True)
                continue
            _cut(pieces, small, (base + offset, storage.data_ptr(), nbytes))
        _copy_all(pieces, small, threads, copy)
    finally:  # whatever happens, nothing is copied into the image any more when this returns
        for stream in streams:
            stream.synchronize()


def copy_pieces(whole: Iterable[Piece], *, threads: int = 0) -> None:
    """Copy between addresses, of any length each; ``threads`` as in `copy_into`."""
    pieces: deque[Piece] = deque()
    small: list[Piece] = []
    for each in whole:
        _cut(pieces, small, each)
    _copy_all(pieces, small, threads)


def _cut(pieces: "deque[Piece]", small: list[Piece], whole: Piece) -> None:
    target, source, nbytes = whole
    if nbytes <= SMALL:
        small.append(whole)
        return
    for start in range(0, nbytes, PIECE):
        pieces.append((target + start, source + start, min(PIECE, nbytes - start)))


def _copy_all(
    pieces: "deque[Piece]", small: list[Piece], threads: int, copy: Copy | None = None
) -> None:
    copy = copy or _copy
    helpers = min((threads or torch.get_num_threads()) - 1, len(pieces) - 1)
    running = [_pool().submit(_copy_until_empty, pieces, copy) for _ in range(helpers)]
    for piece in small:
        _copy_at_once(*piece)
    try:
        _copy_until_empty(pieces, copy)
    finally:
        for helper in running:
            helper.result()


def equal_bytes(
    image: torch.Tensor,
    parts: Sequence[tuple[int, torch.UntypedStorage]],
    *,
    sample: int = 0,
    threads: int = 0,
) -> bool:
    """Whether each storage, on the CPU, has the bytes at its offset in ``image``.

    Args:
        image, parts, threads: as in `copy_into`.
        sample: bytes in the middle of a large storage that are compared; 0 for all of it.
    """
    pieces: deque[Piece] = deque()
    small: list[Piece] = []
    base = image.data_ptr()
    for offset, storage in parts:
        start, nbytes = 0, storage.nbytes()
        if sample and nbytes > SMALL:
            start, nbytes = nbytes // 2, sample
        _cut(pieces, small, (base + offset + start, storage.data_ptr() + start, nbytes))
    found: list[Piece] = []

    def compare(target: int, source: int, nbytes: int) -> None:
        if _compare(target, source, nbytes):
            found.append((target, source, nbytes))
            pieces.clear()

    if any(_compare_at_once(*piece) for piece in small):
        return False
    _copy_all(pieces, [], threads, compare)
    return not found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a ``uint8`` tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_until_empty(pieces: "deque[Piece]", copy: Copy) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        copy(*piece)


def memory_at(address: int, nbytes: int) -> Any:
    """The memory for a system call, which fails with ``EFAULT`` where nothing is mapped."""
    return (ctypes.c_char * nbytes).from_address(address)


def _writing_to(file: int, base: int) -> Copy:
    """How to copy to addresses of a mapping of ``file``, which begins at ``base``."""

    def copy(target: int, source: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            memory = memory_at(source + done, nbytes - done)
            try:
                done += os.pwrite(file, memory, target - base + done)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                raise ImageError("the memory of a tensor was freed while it was copied") from error

    return copy


def _memcmp(library: ctypes.CDLL) -> Callable[[int, int, int], int]:
    memcmp = library.memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp


def _memmove(library: ctypes.CDLL) -> Copy:
    memmove = library.memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove.restype = None
    return memmove


_compare = _memcmp(ctypes.CDLL(None))
"""Of two addresses; 0 if so many bytes are the same there. Other Python threads run meanwhile."""
_compare_at_once = _memcmp(ctypes.PyDLL(None))
"""The same, while none does."""
_copy = _memmove(ctypes.CDLL(None))
"""From one address to another, while other Python threads run."""
_copy_at_once = _memmove(ctypes.PyDLL(None))
"""The same for what is copied before another thread could have taken over."""


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="staging")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
