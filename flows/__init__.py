"""Prefect flows, one per file. A flow orders tasks; the work is in ``tasks`` and below."""
