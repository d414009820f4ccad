"""The switch for Trinity-RFT, as far as it goes without Trinity; ``make trinity`` has the rest."""

import shutil
import subprocess
import sys
from pathlib import Path

from trinity_sync.integrations.trinity.switch import PLUGINS

SAY = """
import runpy, sys
runpy.run_path(sys.argv[1])
print("trinity_sync.integrations.trinity.switch" in sys.modules)
"""


def switches_on(plugin: Path) -> str:
    command = [sys.executable, "-c", SAY, str(plugin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_copy_that_trinity_made_of_the_plugin_does_nothing(tmp_path: Path) -> None:
    (plugin,) = [path for path in PLUGINS.glob("*.py") if not path.name.startswith("__")]
    copy = Path(shutil.copy2(plugin, tmp_path))
    assert (switches_on(plugin), switches_on(copy)) == ("True", "False")
