"""Imports what the children of a server of forks need: ``PRELOADED``, once for all of them.

Collections of garbage would take a fifth of that. In the children they would look at all of it, and
so copy its memory.
"""

import gc
import os
from importlib import import_module

gc.disable()
for name in ("tests.support.forked", *os.environ["PRELOADED"].split()):
    import_module(name)
gc.freeze()
gc.enable()
