"""A save: its request, the journal of its root, and what has become of it.

Trainer, saver, worker and commands share it. Nothing here asks a server or drives a save.
"""
