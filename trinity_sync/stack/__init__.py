"""A Prefect server, a Ray node and a flow worker on one machine, started and stopped as daemons."""
