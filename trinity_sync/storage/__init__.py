"""Committed steps on disk: written from sealed images, verified, restored, and removed.

``persist`` and ``commit`` turn images into a committed step, ``discovery`` finds the steps that
can be loaded, ``restore`` loads one. Nothing here imports Prefect, Ray or SQLAlchemy.
"""
