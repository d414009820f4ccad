"""A Slurm of one node on this machine: its daemons in a temporary folder, on free ports."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.savers import await_that

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
NODE = "node-of-tests"
FREEZER = Path("/sys/fs/cgroup/freezer")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


@dataclass
class Slurm:
    """Commands of a running Slurm, and jobs whose output lies in a folder."""

    folder: Path
    proctrack: str
    variables: dict[str, str]

    def run(self, *command: str | Path) -> str:
        """Run a command, and return what it prints."""
        done = subprocess.run(
            [*map(str, command)],
            env={**self.variables, "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script, and return the number of its job."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        output = ["--open-mode=append", f"--output={self.folder}/%j.out"]
        return self.run("sbatch", "--parsable", *output, *options, path).strip()

    def state(self, job: str) -> str:
        found = self.run("scontrol", "show", "job", job)
        return next(each[9:] for each in found.split() if each.startswith("JobState="))

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def await_output(self, job: str, text: str) -> None:
        await_that(lambda: text in self.output(job), f"{text!r} in the output of job {job}")

    def requeue(self, job: str) -> None:
        """Kill a job that runs, and start it again, after seconds instead of two minutes.

        The credential of a job that starts in the second of its end is taken for the revoked one.
        """
        self.run("scontrol", "requeue", job)
        await_that(lambda: self.state(job) == "PENDING", f"job {job} is requeued")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def await_end(self, job: str) -> str:
        """Wait until no process of a job is left, and return its state."""
        await_that(lambda: self.run("squeue", "-h", "-j", job) == "", f"job {job} ends")
        return self.state(job)

    def end_jobs(self) -> None:
        for job in self.run("squeue", "-h", "-o", "%i").split():
            self.run("scancel", "--full", "--signal=KILL", job)
            self.run("scancel", job)
            self.await_end(job)


@pytest.fixture(scope="module", params=["cgroup", "linuxproc"])
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Slurm]:
    """Each way in which Slurm finds the processes of a job."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]:
        pytest.exit(
            f"this needs Slurm; missing are {', '.join(missing)}. On Debian: "
            "apt-get install slurm-wlm munge",
            returncode=1,
        )
    proctrack = request.param
    if proctrack == "cgroup" and not os.access(FREEZER, os.W_OK):
        pytest.skip(f"{FREEZER} cannot be written, which Slurm needs to track jobs by cgroup")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):  # munged's socket is for all
        parent.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    for each in ("state", "spool"):
        (folder / each).mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    config = CONFIG.format(
        host=socket.gethostname(),
        controller_port=ports[0],
        node_port=ports[1],
        user=getpass.getuser(),
        folder=folder,
        proctrack=proctrack,
        node=NODE,
    )
    (folder / "slurm.conf").write_text(config)
    paths = {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = [f"--{name}={folder / path}" for name, path in paths.items()]
    made = Slurm(folder, proctrack, {**os.environ, "PATH": PATH})
    with ExitStack() as daemons:

        def start(*command: str | Path) -> None:
            log = daemons.enter_context((folder / f"{command[0]}.log").open("w"))
            daemon = subprocess.Popen(
                [*map(str, command)], env=made.variables, stdout=log, stderr=log
            )
            daemons.callback(daemon.wait, 30)
            daemons.callback(daemon.terminate)

        start("munged", "--foreground", "--force", f"--key-file={folder}/key", *munge)
        await_that((folder / "munge.socket").exists, "munged serves")
        start("slurmctld", "-D", "-f", folder / "slurm.conf")
        start("slurmd", "-D", "-f", folder / "slurm.conf", "-N", NODE)
        await_that(lambda: "idle" in made.run("sinfo", "-h", "-o", "%T"), "the node is idle")
        daemons.callback(made.end_jobs)
        yield made
    if proctrack == "cgroup":
        (FREEZER / f"slurm_{NODE}").rmdir()
