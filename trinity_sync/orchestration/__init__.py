"""Prefect on the stack side: the flow worker, deployments, automations and recovery of runs."""
