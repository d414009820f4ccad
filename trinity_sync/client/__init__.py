"""The trainer's side of a save: stage it, request its flow run, report what became of it.

Nothing here imports Prefect, Ray or SQL, so a trainer's environment need not have them.
"""
