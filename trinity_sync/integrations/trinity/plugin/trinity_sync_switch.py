"""Plugin that switches trinity_sync on in a process of Trinity.

Trinity copies each plugin into its own package and loads it from there at every later start. Such a
copy does nothing.
"""

from pathlib import Path

import trinity_sync

if Path(__file__).resolve().is_relative_to(Path(trinity_sync.__path__[0]).resolve()):
    import trinity_sync.integrations.trinity.switch
