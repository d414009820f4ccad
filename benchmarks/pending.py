"""What a pending save costs the ranks of a node: calls to the server, and CPU time.

Each rank is a process of its own with gloo, and reaches a real Prefect server through a relay of
its own, which counts its calls. No worker takes the flow run, so the save stays pending.
"""

import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.ranks import on_ranks

SECONDS = 10.0
SETTLE_S = 3.0
"""Seconds for the request of the flow run, and for what is imported for it."""
PHASES = ("before the first save", "pending, training goes on", "pending, in wait_all")


class Relay(ThreadingHTTPServer):
    """Passes calls on to a server, and records when they came."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self.target = target
        self.calls: list[float] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """URL of the API behind the relay."""
        return f"http://127.0.0.1:{self.server_port}/api"


class _Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_GET(self) -> None:
        self.server.calls.append(time.time())
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else None
        url = self.server.target + self.path.removeprefix("/api")
        kind = {"content-type": "application/json"}
        asked = urllib.request.Request(url, data=body, headers=kind, method=self.command)
        try:
            with urllib.request.urlopen(asked) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        with suppress(OSError):  # of a rank that has ended
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


def wait_in_each_phase(root: str, urls: list[str]) -> list[dict[str, tuple[float, float, float]]]:
    """Return each phase's begin and end (seconds since the epoch) and CPU seconds, by rank."""
    import torch
    import torch.distributed as dist

    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.errors import SaveTimeoutError

    os.environ["PREFECT_API_URL"] = urls[dist.get_rank()]
    found: dict[str, tuple[float, float, float]] = {}
    saves = CheckpointCoordinator.of_process_group(root)

    def in_wait_all() -> None:
        try:
            saves.wait_all(timeout=SECONDS)
        except SaveTimeoutError:
            return
        raise AssertionError("the save has ended")

    for phase in PHASES:
        dist.barrier()
        began, cpu = time.time(), time.process_time()
        if phase == PHASES[2]:
            in_wait_all()
        else:
            time.sleep(SECONDS)
        found[phase] = (began, time.time(), time.process_time() - cpu)
        dist.barrier()
        if phase == PHASES[0]:
            saves.save(1, {"model": {"w": torch.zeros(1000)}})
            time.sleep(SETTLE_S)
    foreign = {"prefect", "fastapi", "sqlalchemy"} & sys.modules.keys()
    assert not foreign, f"a trainer has imported {foreign}"
    saves.close(timeout=0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def main() -> None:
    """Measure with the given numbers of ranks, 8 by default, and print a table."""
    from benchmarks.scale import prefect_server

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with (
        tempfile.TemporaryDirectory(prefix="bench-pending-") as folder,
        tempfile.TemporaryDirectory(prefix="trinity_sync-pending-", dir="/dev/shm") as memory,
        ExitStack() as relays,
    ):
        own = {"TRINITY_SYNC_HOME": f"{folder}/home", "TRINITY_SYNC_SPOOL": memory}
        os.environ |= own | {"TRINITY_SYNC_STACK__MAINTENANCE__SCHEDULES": "false"}
        with prefect_server():
            target = os.environ["PREFECT_API_URL"]
            each = [relays.enter_context(Relay(target)) for _ in range(ranks)]
            results = on_ranks(
                ranks,
                "benchmarks.pending:wait_in_each_phase",
                f"{folder}/ckpts",
                [relay.url for relay in each],
                environment=own,
                log=Path(folder) / "ranks.log",
            )
        for relay in each:
            relay.shutdown()
    print("| phase | rank | calls to the server in 10 s | CPU, % of a core |\n|---|---|---|---|")
    for phase in PHASES:
        for rank, (relay, found) in enumerate(zip(each, results, strict=True)):
            began, ended, cpu = found[phase]
            calls = sum(began <= call <= ended for call in relay.calls)
            print(f"| {phase} | {rank} | {calls} | {100 * cpu / (ended - began):.2f} |")


if __name__ == "__main__":
    main()
