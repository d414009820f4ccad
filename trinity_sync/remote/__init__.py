"""Copies of committed steps behind an fsspec URL: upload, download, and required copies."""
