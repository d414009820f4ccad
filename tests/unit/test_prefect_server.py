"""The garbage of a server that waits for its database does not stop it."""

import subprocess
import sys
from pathlib import Path

STORY = """
import sqlite3, sys, threading
from trinity_sync.orchestration.prefect_server import collect_in_a_thread

if sys.argv[2] == "in a thread":
    collect_in_a_thread()
first, second = (
    sqlite3.connect(sys.argv[1], timeout=4, isolation_level=None, check_same_thread=False)
    for _ in range(2)
)
cursor = second.execute("SELECT 1 UNION ALL SELECT 2")  # not at its end, and reads no table
cursor.fetchone()
first.execute("BEGIN IMMEDIATE")
waiting, found = threading.Event(), []

def wait_for_the_first():
    waiting.set()
    try:
        second.execute("BEGIN IMMEDIATE")
        found.append("went on")
    except sqlite3.OperationalError as error:
        found.append(error)

thread = threading.Thread(target=wait_for_the_first)
thread.start()
waiting.wait()
threading.Event().wait(0.5)  # it is in the call
garbage = [cursor]
garbage.append(garbage)
del cursor, garbage
kept = [[] for _ in range(10**6)]  # the collector looks at these many times
first.execute("COMMIT")
thread.join()
print(found[0])
"""


def story(tmp_path: Path, collected: str) -> str:
    command = [sys.executable, "-c", STORY, str(tmp_path / "db"), collected]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_transaction_ends_although_others_wait_and_garbage_is_collected(tmp_path: Path) -> None:
    assert story(tmp_path, "in a thread") == "went on"


def test_python_s_own_collector_stands_in_the_way(tmp_path: Path) -> None:
    """If this fails, `trinity_sync.orchestration.prefect_server` is not needed any more."""
    assert story(tmp_path, "as it comes") == "database is locked"
