"""What Trinity's loader of plugins runs: it switches trinity_sync on in this process.

Trinity copies each plugin into its own package, where it finds it at every later start, asked for
or not. Such a copy does nothing.
"""

from pathlib import Path

import trinity_sync

if Path(__file__).resolve().is_relative_to(Path(trinity_sync.__path__[0]).resolve()):
    import trinity_sync.integrations.trinity.switch
