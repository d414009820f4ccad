"""From live tensors to sealed images in shared memory: the only part that a trainer waits for.

``image`` lays out the bytes of a ``.pt`` file, ``slot`` holds them in shared memory that
``slot_pool`` looks after, ``ticket`` seals them, ``spool`` is a node's folder of both, and
``stager`` puts them together. `tensors` has the way back. Nothing here knows Prefect, Ray or SQL.
"""
