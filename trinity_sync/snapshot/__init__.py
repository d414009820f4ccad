"""From live tensors to sealed images in shared memory: the only part a trainer waits for.

``image`` knows the bytes of a ``.pt`` file, ``slot`` the shared memory they are laid out in,
``ticket`` the seal, ``spool`` a node's folder of both, ``stager`` puts them together. ``loading``
is the way back, ``kept`` says what a free slot still holds.
Nothing here knows Prefect, Ray or SQL.
"""
