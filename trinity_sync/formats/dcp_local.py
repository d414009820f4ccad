"""PyTorch Distributed Checkpoint (DCP) in one process, without a process group."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def run_dcp_alone() -> Iterator[None]:
    """Run DCP within the block without a process group, and raise the original errors.

    DCP warns that there is no process group, wraps the errors of ranks, and finishes a file after
    the disk refused a write, which hides the cause.
    """
    with warnings.catch_warnings(), torch.device("cpu"):  # DCP computes on the default device
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            first: BaseException = error
            if isinstance(error, CheckpointException):
                first = next(iter(error.failures.values()))[0]
            raise _find_os_error(first) or first from error


def _find_os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
