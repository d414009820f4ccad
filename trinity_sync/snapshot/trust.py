"""Whose files are unpickled as they are, and from whose nothing but tensors and values is taken.

Unpickling runs what the bytes say. So does loading a checkpoint that holds objects of a user's own
classes, and a job must be able to load its own. A file is trusted if it is this user's and nobody
else may write it, or if it lies below a folder that ``TRINITY_SYNC_TRUSTED`` names (several are
separated by ``:``). From all others PyTorch takes what ``weights_only`` allows, and NumPy's arrays
besides, of which veRL's random state consists.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity_sync.errors import CommitError

TRUSTED = "TRINITY_SYNC_TRUSTED"


def is_trusted(path: Path) -> bool:
    """Whether a file may be unpickled as it is; see the module.

    Raises:
        OSError: there is no such file.
    """
    found = path.stat()
    if found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return True
    real = path.resolve()
    named = filter(None, os.environ.get(TRUSTED, "").split(os.pathsep))
    return any(real.is_relative_to(Path(folder).resolve()) for folder in named)


@contextmanager
def only_plain(path: Path) -> Iterator[None]:
    """Within it, ``torch.load(weights_only=True)`` of a file takes NumPy's arrays, too.

    Raises:
        CommitError: what is loaded within is more than tensors, arrays and plain values.
    """
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
    """
    if is_trusted(path):
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=False)
    with only_plain(path):
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)


def _numpy() -> list[Any]:
    core = np._core if hasattr(np, "_core") else np.core
    kinds = [kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")]
    plain = [kind for kind in kinds if kind is not np.dtypes.ObjectDType]
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, *plain]
