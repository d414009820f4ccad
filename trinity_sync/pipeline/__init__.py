"""From sealed images to a committed, copied and pruned step, without Prefect and Ray.

Flows call the parts in their tasks, on the nodes that hold the images; a saver process calls
`run_save`.
"""
