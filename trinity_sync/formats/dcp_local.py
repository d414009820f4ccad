"""PyTorch's Distributed Checkpoint in one process, without a process group."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def alone() -> Iterator[None]:
    """Let PyTorch save or load here; what goes wrong is raised as what it was.

    PyTorch warns that it is alone, wraps what a rank raised, and writes the end of a file that the
    disk has refused already, which hides why.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            first: BaseException = error
            if isinstance(error, CheckpointException):
                first = next(iter(error.failures.values()))[0]
            raise _of_the_disk(first) or first from error


def _of_the_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
