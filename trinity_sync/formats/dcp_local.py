"""PyTorch's Distributed Checkpoint in one process, without a process group."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def run_dcp_alone() -> Iterator[None]:
    """Within the block, run DCP without a process group, and raise the original errors.

    DCP warns that there is no process group, wraps what a rank raised, and writes the end of a file
    after the disk has refused it, which hides the cause.
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
