"""Remotes: copies of committed steps behind an fsspec URL, optional or required."""
