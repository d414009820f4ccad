"""Prefect flows, one a file: what runs, in which order. The work is the tasks'."""
