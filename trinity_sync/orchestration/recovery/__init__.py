"""What crashes leave in Prefect, in memory and on disk, and how the stack repairs it.

`node.NodeRecovery` is the worker's part: at every poll, for the runs and images of its own node.
`reconcile.reconcile` is the part of the ``reconcile`` flow and command: everything, at any time.

- `flow_runs`: zombie runs, which Prefect shows as under way and no process executes, and task runs
  whose own reports were lost.
- `images`: orphaned images, which wait in shared memory and no flow run will persist.
"""
