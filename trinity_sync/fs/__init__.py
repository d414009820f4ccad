"""File-system operations for crash safety: atomic writes, records, locks and direct I/O.

Nothing here knows checkpoints, PyTorch, Prefect, Ray or SQL.
"""
