"""A Prefect server on SQLite that does not stand still; its arguments are those of ``prefect``.

While a connection waits for another one's transaction, a minute at most, its lock is taken. A
statement that failed leaves its cursor in a traceback, and whichever thread collects that garbage
wants the lock. If it is the thread of the event loop, nobody ends the transaction that all wait
for, and the server answers nobody until the minute is over. So garbage is collected by a thread
that nobody waits for.
"""

import gc
import runpy
import threading
import time
from itertools import count

PAUSE_S = 0.5
FULL_EVERY = 60
"""Collections, after which one looks at old objects, too."""


def collect_in_a_thread() -> None:
    """Have this process's garbage collected by a thread of its own, and by no other."""
    gc.disable()
    threading.Thread(target=_collect, name="collects-garbage", daemon=True).start()


def _collect() -> None:
    for number in count(1):
        time.sleep(PAUSE_S)
        gc.collect(1 if number % FULL_EVERY else 2)


if __name__ == "__main__":
    collect_in_a_thread()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
