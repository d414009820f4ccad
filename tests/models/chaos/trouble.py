"""Clocks that jump and a disk that fails or is slow, for all processes of the node that is tested.

What no mount can do a library does that is loaded into them (``trouble.c``). This process, and the
Prefect server, as on another machine, have the true clock.
"""

import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class Trouble:
    """The library, built in ``folder``; ``disk`` is what it is to hold up.

    ``environment`` is what loads it; empty where there is no C compiler.
    """

    def __init__(self, folder: Path, disk: Path) -> None:
        self._disk, self.environment = disk, dict[str, str]()
        if compiler := shutil.which("cc") or shutil.which("gcc"):
            library, told = folder / "trouble.so", folder / "trouble"
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
            subprocess.run(command, check=True)
            told.write_bytes(bytes(mmap.PAGESIZE))
            with told.open("r+b") as file:
                self._told = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            self.environment = {"LD_PRELOAD": str(library), "CHAOS_TROUBLE": str(told)}

    @contextmanager
    def made(self, *, clock_s: int = 0, error: int = 0, delay_s: float = 0.0) -> Iterator[None]:
        """Within the block the clock is wrong, and writes to the disk fail or take longer."""
        told = (clock_s, self._disk.stat().st_dev, error, int(delay_s * 1e6))
        self._told[:32] = struct.pack("=qQqq", *told)
        try:
            yield
        finally:
            self._told[:32] = bytes(32)
