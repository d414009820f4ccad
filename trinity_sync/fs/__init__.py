"""File-system operations for crash safety: atomic writes, records, locks, direct I/O, capabilities.

Nothing here knows checkpoints, PyTorch, Prefect, Ray or SQL.
"""
