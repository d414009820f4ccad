"""What an adapter to a training or inference library imports from here.

Next to `trinity_sync` itself, `errors` and `settings`, these are all names that an adapter needs,
ours as well as yours:

- Names in a root: `step_folder`, `step_of_folder`, `split_role_path`, `shard_file`, `MANIFEST`,
  which a committed step has, and `PRIVATE_FOLDER`, which no reader looks into; `attaching_folder`,
  for files that the library writes for a step itself; `refuse_url`.
- Work on all ranks, which succeeds on all of them or raises on all of them: `run_on_all_ranks`,
  `broadcast_from_rank_0`, `lease_on_rank_0`, `open_on_all_ranks`.
- Reading a committed step: `read_manifest` finds it, `lease_to_read` keeps it meanwhile;
  `load_states` and `load_bytes` load from it, and `OpenFiles` opens files for another loader.
  `require_unreplaced` checks afterwards that it was one step.
- Names of a process: `make_run_key` for a run that a library starts again in the same process,
  `make_reader_name` for a `trinity_sync.WeightReader`.
"""

from trinity_sync.client.collective import (
    broadcast_from_rank_0,
    lease_on_rank_0,
    open_on_all_ranks,
    run_on_all_ranks,
)
from trinity_sync.client.run_context import make_run_key
from trinity_sync.layout import (
    MANIFEST,
    PRIVATE_FOLDER,
    attaching_folder,
    refuse_url,
    shard_file,
    split_role_path,
    step_folder,
    step_of_folder,
)
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.restore import OpenFiles, load_bytes, load_states
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.weights.reader import make_reader_name

__all__ = [
    "MANIFEST",
    "Manifest",
    "OpenFiles",
    "PRIVATE_FOLDER",
    "attaching_folder",
    "broadcast_from_rank_0",
    "lease_on_rank_0",
    "lease_to_read",
    "load_bytes",
    "load_states",
    "make_reader_name",
    "make_run_key",
    "open_on_all_ranks",
    "read_manifest",
    "refuse_url",
    "require_unreplaced",
    "run_on_all_ranks",
    "shard_file",
    "split_role_path",
    "step_folder",
    "step_of_folder",
]
