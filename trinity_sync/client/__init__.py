"""The trainer's side of a save: stage it, wake the saver, follow it until it is committed.

Nothing here imports Prefect, Ray or SQL, so a trainer's environment need not have them.
"""
