"""The unpickling policy: which files are unpickled in full, and which as plain values only.

Unpickling runs code that the bytes name, and a job must be able to load its own checkpoints with
objects of a user's classes. A file is trusted if this user or root owns it and no other user may
write it, or if it lies below a folder that ``TRINITY_SYNC_TRUSTED_PATHS`` names (several are
separated by ``:``). Other files are loaded with ``weights_only``, plus NumPy's arrays and
scalars, which veRL's random state consists of, and ``BytesIO``, a form of a module's extra state.

Other users may be able to write a folder on the path, and to give the file's name to another file
at any moment. So the open file is checked, and the bytes are read from it.
"""

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trinity_sync.errors import CommitError
from trinity_sync.fs.atomic import TRUSTED, is_trusted, open_no_follow


def is_plain_forced() -> bool:
    """Return whether the user forbids torch to unpickle more than plain values, in any file."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    return forced.lower() in ("1", "y", "yes", "true")


@contextmanager
def restrict_to_plain(path: Path) -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` load the block's file, as `allow_plain` has it.

    Raises:
        CommitError: the file at ``path`` holds more than tensors, arrays and plain values.
    """
    import torch.distributed.tensor  # noqa: F401, registers DTensor as safe

    allow_plain()
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        if is_plain_forced():
            raise CommitError(
                f"{path} holds more than tensors and plain values, so it is not unpickled "
                f"({reason}): TORCH_FORCE_WEIGHTS_ONLY_LOAD is set. Unset it if you trust who "
                "wrote the file"
            ) from error
        raise CommitError(
            f"{path} is not this user's alone, and holds more than tensors and plain values, "
            f"so it is not unpickled ({reason}). If you trust who wrote it, set "
            f"{TRUSTED}={path.parent}"
        ) from error


def load_file(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` on the CPU: in full if it is trusted, otherwise plain values.

    Raises:
        CommitError: as `restrict_to_plain`.
        OSError: as `open_no_follow`.
    """
    import torch

    with open_no_follow(path) as file:
        opened = f"/proc/self/fd/{file.fileno()}"  # torch.load maps files by name only
        plain = is_plain_forced() or not is_trusted(file.fileno())
        with restrict_to_plain(path) if plain else nullcontext():
            return torch.load(opened, map_location="cpu", mmap=mmap, weights_only=plain)


def allow_plain() -> None:
    """Have ``weights_only`` take NumPy's plain values and ``BytesIO`` too, in all of this process.

    Torch's ``safe_globals`` would undo at its end what the user has allowed, or another thread. A
    program's own one, such as `transformers`', undoes this, so each load allows it again.
    """
    import numpy as np
    import torch

    core = np._core if hasattr(np, "_core") else np.core
    kinds = [kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")]
    plain = [kind for kind in kinds if kind is not np.dtypes.ObjectDType]
    made = core.multiarray._reconstruct, core.multiarray.scalar
    torch.serialization.add_safe_globals([*made, np.ndarray, np.dtype, *plain, io.BytesIO])
