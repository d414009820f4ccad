"""A campaign of faults that tries to lose a checkpoint; see docs/contributing/tests.md."""
