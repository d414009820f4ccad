"""Packages that an integration needs and the client does not bring."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.errors import MissingPackageError


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra within the block.

    Raises:
        MissingPackageError: one is not installed; the message names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{error.name} is not installed in {sys.prefix}. Install the version that you train "
            f'with, or: pip install "trinity-sync[{extra}]"',
            name=error.name,
        ) from error
