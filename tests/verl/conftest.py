"""The tiny model of the example, which those that start veRL's trainers train."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
