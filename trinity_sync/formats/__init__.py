"""Conversion of committed steps to and from PyTorch DCP checkpoints and Hugging Face models.

PyTorch plans, reads and writes DCP checkpoints. Nothing here knows Prefect, Ray, SQL or training.
"""
