"""Prefect tasks, one verb a file: name, retries and look; the work is a call into trinity_sync."""
