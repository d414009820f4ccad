"""Prefect and Ray, from both sides: who asks for a flow run, and who runs it.

``trigger`` asks, ``worker`` runs, ``sweep`` finds what nobody asked for, ``watch`` follows a save
to its end, ``stack`` is a server, a Ray node and a worker on one machine.
"""
