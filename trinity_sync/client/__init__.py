"""The trainer's side of a save: it asks Prefect for the flow run, and learns what became of it.

Nothing here imports Prefect, so a trainer's environment need not have it.
"""
