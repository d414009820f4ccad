"""What the tasks of the flows do on a node, in Ray processes that do not import Prefect."""
