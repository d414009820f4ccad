"""Storage writer, stager and storage reader of PyTorch's Distributed Checkpoint (DCP).

A committed step has the files of DCP, which plain PyTorch reads::

    global_step_40/actor/.metadata          pickled index, of rank 0
    global_step_40/actor/__0_0.distcp       what rank 0 writes
    global_step_40/actor/__1_0.distcp

`DcpSaver` makes a `StepWriter` for each save, which is DCP's storage writer and its stager.
`StepReader` is DCP's storage reader for a committed step.
"""

from trinity_sync.integrations.dcp.reader import StepReader
from trinity_sync.integrations.dcp.writer import DcpSaver, StepWriter

__all__ = ["DcpSaver", "StepReader", "StepWriter"]
