"""``python -m trinity_sync.saver SPOOL``: started by the first save of a trainer."""

import logging
import os
import sys
from pathlib import Path

from trinity_sync.pipeline.save import NodeWriting
from trinity_sync.saver.saver import Saver
from trinity_sync.settings import StackSettings

LOG_BYTES = 1 << 20


def main() -> None:
    """Commit what waits in a spool until no process saves there any more."""
    log = sys.stderr.fileno()  # a file to which all savers append
    if os.fstat(log).st_size > LOG_BYTES:
        os.ftruncate(log, 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    stack = StackSettings()
    os.nice(stack.worker.nice)
    Saver(Path(sys.argv[1]), NodeWriting.of(stack)).run()


if __name__ == "__main__":
    main()
