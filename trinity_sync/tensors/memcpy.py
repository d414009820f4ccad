"""Copy many tensors at memcpy speed, also while the cores are busy with training.

A parallel ``Tensor.copy_`` joins its threads at a barrier for every tensor. With hundreds of
tensors that costs several times the copy as soon as one thread waits for its core. Here each thread
takes the next piece until none is left, and the threads join once.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, cast

import torch

from trinity_sync.errors import ImageError

PIECE = 4 << 20
"""Bytes that a thread copies at a time."""
SMALL = 32 << 10
"""Bytes up to which the calling thread copies a storage itself."""

Piece = tuple[int, int, int]
"""Target address, source address, number of bytes."""
Copy = Callable[[int, int, int], object]


_get_device: Callable[[torch.UntypedStorage], torch.device] = attrgetter("device")
ComputedEvents = Mapping[torch.device, torch.Event]
"""For each GPU, the event after which the storages to copy are computed."""


def record_computed(storages: Iterable[torch.UntypedStorage]) -> ComputedEvents:
    """Record an event on the current stream of each GPU that holds one of the storages."""
    computed = {}
    for device in set(map(_get_device, storages)):
        if device.type != "cpu":
            computed[device] = torch.accelerator.current_stream(device).record_event()
    return computed


def use_device(computed: ComputedEvents) -> AbstractContextManager[object]:
    """Return a context that makes the GPU with the storages this thread's current device.

    The current device of a new thread is the first GPU, where CUDA would create a context of
    hundreds of MB.
    """
    for device in computed:
        if device.type == "cuda":
            return torch.cuda.device(device)
    return nullcontext()


@cache
def get_staging_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which a GPU's storages are copied, always the same.

    torch hands out some 32 streams in turn, so another stream would be shared with collectives.
    """
    return torch.Stream(device)


def copy_into(
    image: torch.Tensor,
    holes: Sequence[tuple[int, int]],
    storages: Sequence[torch.UntypedStorage],
    *,
    computed: ComputedEvents | None = None,
    threads: int = 0,
    file: int | None = None,
    fresh: int | None = None,
) -> None:
    """Copy each storage to its hole in ``image``, a ``uint8`` tensor on the CPU.

    ``holes`` are (offset, length) in bytes. Storages on a GPU are copied on a separate stream,
    which waits for ``computed`` (by default the work submitted to the current stream so far) and is
    synchronized once, at the end. ``threads`` copy the others; 0 for torch's intra-op threads.

    With ``file``, the descriptor of the file that ``image`` maps, another thread may free or resize
    storages on the CPU during the copy: the kernel reads them, which fails with an error where
    memory is gone instead of crashing. It takes about twice the time.

    ``fresh`` is that descriptor if memory of the image is not mapped yet, which takes longer than a
    copy: it is filled in the quickest way then.

    Raises:
        ImageError: with ``file``, the memory of a storage was freed.
    """
    pieces: deque[Piece] = deque()
    streams = set[torch.Stream]()
    base = image.data_ptr()
    if computed is None:
        computed = record_computed(storages)
    copy = _copy if fresh is None else _copying_into_fresh(fresh, base)
    copy = copy if file is None else _writing_to(file, base)
    try:
        for (offset, nbytes), storage in zip(holes, storages, strict=True):
            if computed and (device := storage.device) in computed:
                stream = get_staging_stream(device)
                if stream not in streams:
                    stream.wait_event(computed[device])
                    streams.add(stream)
                with stream:
                    target = image[offset : offset + nbytes]
                    target.copy_(view_bytes(storage), non_blocking=True)
            elif nbytes <= SMALL:
                _copy_at_once(base + offset, storage.data_ptr(), nbytes)
            else:
                _cut(pieces, base + offset, storage.data_ptr(), nbytes)
        _copy_all(pieces, threads, copy)
    finally:  # no copy into the image outlives this call
        for stream in streams:
            stream.synchronize()


def copy_pieces(whole: Iterable[Piece], *, threads: int = 0) -> None:
    """Copy pieces of any length between addresses; ``threads`` as in `copy_into`."""
    pieces: deque[Piece] = deque()
    for piece in whole:
        if piece[2] <= SMALL:
            _copy_at_once(*piece)
        else:
            _cut(pieces, *piece)
    _copy_all(pieces, threads, _copy)


def _cut(pieces: "deque[Piece]", target: int, source: int, nbytes: int) -> None:
    for start in range(0, nbytes, PIECE):
        pieces.append((target + start, source + start, min(PIECE, nbytes - start)))


def _copy_all(pieces: "deque[Piece]", threads: int, copy: Copy) -> None:
    running = []
    with suppress(RuntimeError):  # the interpreter ends and starts no thread: this one copies all
        for _ in range(min(threads or torch.get_num_threads(), len(pieces)) - 1):
            running.append(_pool().submit(_copy_until_empty, pieces, copy))
    try:
        _copy_until_empty(pieces, copy)
    finally:
        for helper in running:
            helper.result()


def equal_bytes(image: torch.Tensor, parts: Sequence[tuple[int, torch.UntypedStorage]]) -> bool:
    """Return whether each storage, on the CPU, equals the bytes at its offset in ``image``.

    ``parts`` are (offset in bytes, storage).
    """
    pieces: deque[Piece] = deque()
    base = image.data_ptr()
    for offset, storage in parts:
        target, source, nbytes = base + offset, storage.data_ptr(), storage.nbytes()
        if nbytes > SMALL:
            _cut(pieces, target, source, nbytes)
        elif _compare_at_once(target, source, nbytes):
            return False
    found: list[Piece] = []

    def compare(target: int, source: int, nbytes: int) -> None:
        if _compare(target, source, nbytes):
            found.append((target, source, nbytes))
            pieces.clear()

    _copy_all(pieces, 0, compare)
    return not found


def view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a ``uint8`` tensor, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def exceeds_storage(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor has elements beyond its storage, which was resized."""
    if not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    return bool(end * tensor.element_size() > tensor.untyped_storage().nbytes())


def _copy_until_empty(pieces: "deque[Piece]", copy: Copy) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        copy(*piece)


def view_memory(address: int, nbytes: int) -> Any:
    """Return memory as a buffer for system calls, which fail with ``EFAULT`` if it is unmapped."""
    return (ctypes.c_char * nbytes).from_address(address)


def _writing_to(file: int, base: int) -> Copy:
    """Return a copy function for targets in a mapping of ``file`` that starts at ``base``."""

    def copy(target: int, source: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            memory = view_memory(source + done, nbytes - done)
            try:
                done += os.pwrite(file, memory, target - base + done)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                raise ImageError("the memory of a tensor was freed while it was copied") from error

    return copy


def _copying_into_fresh(file: int, base: int) -> Copy:
    """Return a copy function as `_writing_to`, for memory that is not mapped.

    A write neither clears pages nor maps them, which takes 2 memcpys instead of 4. The kernel lets
    one thread at a time write a file: the others map memory in large steps, and copy into it.
    """
    write, writing = _writing_to(file, base), threading.Lock()

    def copy(target: int, source: int, nbytes: int) -> None:
        if writing.acquire(blocking=False):
            try:
                write(target, source, nbytes)
            finally:
                writing.release()
        else:
            map_pages(target, nbytes)
            _copy(target, source, nbytes)

    return copy


def map_pages(address: int, nbytes: int) -> bool:
    """Map memory for writing, without the GIL; return whether it was done. No byte changes."""
    begin = address - address % mmap.PAGESIZE
    return not _madvise(begin, address + nbytes - begin, _POPULATE_WRITE)


def map_image(image: torch.Tensor) -> None:
    """Map all memory of an image, as `map_pages`, with all threads."""
    pieces: deque[Piece] = deque()
    _cut(pieces, image.data_ptr(), 0, len(image))
    _copy_all(pieces, 0, lambda target, _, nbytes: map_pages(target, nbytes))


def _declare(function: Any, result: type[ctypes.c_int] | None) -> Copy:
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = result
    return cast(Copy, function)


# `PyDLL` holds the GIL, which is quicker for small pieces; `CDLL` releases it
_compare = _declare(ctypes.CDLL(None).memcmp, ctypes.c_int)
_compare_at_once = _declare(ctypes.PyDLL(None).memcmp, ctypes.c_int)
_copy = _declare(ctypes.CDLL(None).memmove, None)
_copy_at_once = _declare(ctypes.PyDLL(None).memmove, None)
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE_WRITE = 23
CAN_MAP_PAGES = not _madvise(0, 0, _POPULATE_WRITE)
"""Whether the kernel has what `map_pages` needs, as Linux 5.14 does."""


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="staging")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads
