import sys
from pathlib import Path

# the CPU platform for veRL and the tiny model are those of the example
sys.path.insert(0, str(Path(__file__).parents[3] / "examples/demo"))
