"""Prefect tasks: names, retries and artifacts. The work is in ``trinity_sync``."""
