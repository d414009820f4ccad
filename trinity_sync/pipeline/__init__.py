"""From sealed images to a committed, copied and pruned step, without Prefect and Ray.

`order` says which part comes when. The flow has its tasks do the parts, on the nodes that hold the
images; the saver process has its threads.
"""
