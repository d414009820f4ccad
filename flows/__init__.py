"""Prefect flows: `save`, and `maintenance` of what is saved. A flow orders tasks."""
