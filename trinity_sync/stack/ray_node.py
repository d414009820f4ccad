"""A Ray node without the servers of its dashboard and of remote drivers; takes the arguments of
``ray``.

Nothing here asks them, and no option leaves them out. A head node would wait for the first one;
each takes a core two seconds to start, and 100 MB.
"""

import runpy

from ray._private.node import Node

for name in ("start_api_server", "start_ray_client_server"):
    setattr(Node, name, lambda *_, **__: None)
runpy.run_module("ray.scripts.scripts", run_name="__main__")
