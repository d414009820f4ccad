"""What a crash-safe program needs of a file system: atomic writes, records, locks, direct I/O.

Nothing here knows checkpoints, PyTorch, Prefect, Ray or SQL.
"""
