"""Whose files are unpickled as they are, and from whose nothing but tensors and values is taken.

Unpickling runs what the bytes say. So does loading a checkpoint that holds objects of a user's own
classes, and a job must be able to load its own. A file is trusted if it is this user's and nobody
else may write it, or if it lies below a folder that ``TRINITY_SYNC_TRUSTED`` names (several are
separated by ``:``). From all others PyTorch takes what ``weights_only`` allows, and NumPy's arrays
besides, of which veRL's random state consists.

Others may write the folder that a file is in, or one above it, and give its name to another file at
any moment. So it is the open file that is trusted or not, and the bytes are read from that.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trinity_sync.errors import CommitError

TRUSTED = "TRINITY_SYNC_TRUSTED"


def open_file(path: Path) -> BinaryIO:
    """Open a file that others may have put there: no link is followed, and no pipe waited for.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "rb", opener=lambda name, usual: os.open(name, usual | flags))


def is_own(fd: int) -> bool:
    """Whether an open file is this user's and nobody else may write it.

    Look before the first byte is read: whoever may write it then may do so while it is read.
    """
    found = os.fstat(fd)
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def is_trusted(fd: int) -> bool:
    """Whether an open file may be unpickled as it is; see the module, and `is_own` for when."""
    real = Path(f"/proc/self/fd/{fd}").readlink()
    named = filter(None, os.environ.get(TRUSTED, "").split(os.pathsep))
    return is_own(fd) or any(real.is_relative_to(Path(folder).resolve()) for folder in named)


@contextmanager
def only_plain(path: Path) -> Iterator[None]:
    """Within it, ``torch.load(weights_only=True)`` of a file takes NumPy's arrays, too.

    Raises:
        CommitError: what is loaded within is more than tensors, arrays and plain values.
    """
    import torch
    import torch.distributed.tensor  # DTensor is plain once it is known

    with torch.serialization.safe_globals(_numpy()):
        try:
            yield
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise CommitError(
                f"{path} is not this user's alone, and holds more than tensors and plain values, "
                f"so it is not unpickled ({reason}). If you trust who wrote it, set "
                f"{TRUSTED}={path.parent}"
            ) from error


def load_file(path: Path, *, mmap: bool = False) -> Any:
    """The state in a file of ``torch.save``, on the CPU; whole if it is trusted, else plain.

    Raises:
        CommitError: as `only_plain`.
        OSError: as `open_file`.
    """
    import torch

    with open_file(path) as file:
        opened = f"/proc/self/fd/{file.fileno()}"  # torch.load maps what has a name, nothing else
        if is_trusted(file.fileno()):
            return torch.load(opened, map_location="cpu", mmap=mmap, weights_only=False)
        with only_plain(path):
            return torch.load(opened, map_location="cpu", mmap=mmap, weights_only=True)


def _numpy() -> list[Any]:
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core
    kinds = [kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")]
    plain = [kind for kind in kinds if kind is not np.dtypes.ObjectDType]
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, *plain]
