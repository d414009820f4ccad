"""``make chaos``: CHAOS_MINUTES (10) of faults by CHAOS_SEED, with what CHAOS_DRIVER (stack) names.

See docs/contributing/tests.md.
"""

import os
import secrets
import signal
import sys
from pathlib import Path

from tests.models.chaos.campaign import campaign
from tests.models.chaos.faults import FAULTS
from tests.models.chaos.report import Report
from tests.models.chaos.world import DRIVERS


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all of it is stopped
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    minutes = float(os.environ.get("CHAOS_MINUTES") or 10)
    kinds = [kind for kind in os.environ.get("CHAOS_FAULTS", "").split(",") if kind]
    if unknown := set(kinds) - set(FAULTS):
        sys.exit(f"CHAOS_FAULTS: no {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    driver = os.environ.get("CHAOS_DRIVER") or "stack"
    if driver not in DRIVERS:
        sys.exit(f"CHAOS_DRIVER: no {driver}; there are {', '.join(DRIVERS)}")
    print(f"CHAOS_DRIVER={driver} CHAOS_SEED={seed} CHAOS_MINUTES={minutes:g}", flush=True)
    report, output = Report(seed, minutes, driver), Path("chaos-output")
    try:
        campaign(report, kinds, on_postgres=os.environ.get("CHAOS_DATABASE") == "postgresql")
    finally:  # what is there, if it is broken off
        print(f"\n{report}")
        output.mkdir(exist_ok=True)
        (output / f"{driver}-{seed}.md").write_text(str(report))
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
