"""What importing the client adds to a process that has imported torch and its DTensors.

Medians of several processes, next to the import of torch in the same processes.
"""

import json
import statistics
import subprocess
import sys

RUNS = 5
PROGRAM = """
import json, os, time
def now():
    pages = int(open("/proc/self/statm").read().split()[1])
    return time.perf_counter(), time.process_time(), pages * os.sysconf("SC_PAGE_SIZE") / 1e6
marks = [now()]
import torch, torch.distributed.tensor
marks.append(now())
from trinity_sync.client.coordinator import CheckpointCoordinator
marks.append(now())
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in zip(marks, marks[1:])]))
"""


def main() -> None:
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True).stdout)
        for _ in range(RUNS)
    ]
    for what, measured in zip(("torch", "the client"), zip(*runs, strict=True), strict=True):
        wall, cpu, mb = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"importing {what}: {wall:.2f} s, {cpu:.2f} CPU s, {mb:.0f} MB")


if __name__ == "__main__":
    main()
