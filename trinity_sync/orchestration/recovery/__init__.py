"""Recovery from crashes: repair what they leave in Prefect, in shared memory and on disk.

- `flow_runs`: zombie runs, which Prefect shows as running and no process executes, and task runs
  whose final states were lost.
- `node.NodeRecovery`: recovers them at every poll of a worker, for the worker's own node, and
  starts a saver where images wait and none lives.
- `reconcile.reconcile`: recovers everything, for the ``reconcile`` flow and command.
"""
