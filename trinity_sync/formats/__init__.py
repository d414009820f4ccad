"""Committed steps in the formats of PyTorch DCP and of Hugging Face, in both directions.

Planning, reading and writing DCP checkpoints are PyTorch's own. Nothing here knows Prefect, Ray,
SQL or training.
"""
