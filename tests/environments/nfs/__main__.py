"""Boot a Linux of its own that has an NFS server and two clients, and run pytest in it.

A container's kernel has no NFS, as a rule. User-mode Linux is a kernel that runs as a process,
needs no privileges and sees the files of this machine; Debian has it, with its modules. What is
needed is unpacked into ``build/nfs`` and not installed.

``python -m tests.environments.nfs [FILES] [OPTIONS OF PYTEST]`` runs the tests of two nodes and,
with their temporary folders on NFS, those of the parts that work on a root's files. Each file has a
process of its own, because a process of such a kernel cannot have more than some 60,000 pages (256
MB).
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "user-mode-linux",
    "nfs-kernel-server",
    "nfs-common",
    "libtirpc3",
    "libwrap0",
    "libnfsidmap1",
    "kmod",
)
PARTS = """
fs/test_capabilities
storage/test_commit storage/test_steps_in_use storage/test_placement
storage/test_restore storage/test_rewind storage/test_verify storage/test_write_permits
retention/test_retention retention/test_retention_races
client/test_attachments client/test_resuming client/test_run_context
orchestration/test_job_registry orchestration/test_orphaned_images orchestration/test_reconcile
"""
NOT_HERE = "large_files_of_one_step_are_kept or judged_by_a_manifest_that_cannot_be_read"
"""Tests: files are not recycled where other nodes may see them; a client grants no leases."""
FILES = [
    "tests/environments/nfs/nodes.py",
    *(f"tests/unit/{part}.py" for part in PARTS.split()),
]
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
BUILD = REPOSITORY / "build/nfs"
UNPACKED = BUILD / "unpacked"
OWN = ("/dev", "/mnt", "/run", "/var/lib")
"""Folders that ``inside.sh`` mounts memory on."""
DISK_BYTES = 16 << 30
MEMORY = "6G"


def main() -> None:
    """Prepare, boot, and exit as pytest has."""
    files = [each for each in sys.argv[1:] if not each.startswith("-")] or FILES
    if gone := [each for each in files if not (REPOSITORY / each.partition("::")[0]).exists()]:
        sys.exit(f"there is no {', '.join(gone)}")
    options = [each for each in sys.argv[1:] if each.startswith("-")]
    missing = [tool for tool in ("apt-get", "dpkg", "mkfs.ext4", "ip") if not shutil.which(tool)]
    if missing:
        sys.exit(f"this needs Debian, or a system made from it, and on it: {', '.join(missing)}")
    if own := next((each for each in OWN if REPOSITORY.is_relative_to(each)), None):
        sys.exit(f"the machine has a {own} of its own, and would not see {REPOSITORY}; move it")
    unpack()
    disk = BUILD / "disk.img"
    disk.unlink(missing_ok=True)
    with disk.open("wb") as image:
        image.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    code = BUILD / "exit-code"
    code.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *options]
    pytest += ["-k", f"not ({NOT_HERE})"]
    BUILD.joinpath("job.sh").write_text(
        f"cd {shlex.quote(str(REPOSITORY))}\n"
        f"for file in {shlex.join(files)}; do\n"
        f'    {shlex.join(pytest)} --basetemp=/mnt/nfs/tests "$file" || failed=1\n'
        "done\n"
        "exit ${failed:-0}\n"
    )
    try:
        boot(disk)
    finally:
        disk.unlink()
    if not code.exists():
        sys.exit("the machine ended before its tests had")
    sys.exit(int(code.read_text()))


def unpack() -> None:
    """Have the packages' files in ``build/nfs``."""
    if UNPACKED.exists():
        return
    archives = BUILD / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=archives).returncode:
        sys.exit("these packages cannot be downloaded; run apt-get update first")
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, BUILD / "partial"], check=True)
    (BUILD / "partial").rename(UNPACKED)


def boot(disk: Path) -> None:
    """Run the machine until it turns itself off."""
    subprocess.run(
        [
            UNPACKED / "usr/bin/linux.uml",
            f"mem={MEMORY}",
            f"ubda={disk}",
            "rootfstype=hostfs",
            "rw",
            f"init={HERE / 'inside.sh'}",
            f"uml_dir={BUILD}",
            "con=null",
            "con0=fd:0,fd:1",
            "quiet",
            f"BUILD={BUILD}",  # the kernel hands its init what it does not know itself
        ],
        stdin=subprocess.DEVNULL,
        check=True,
    )


if __name__ == "__main__":
    main()
