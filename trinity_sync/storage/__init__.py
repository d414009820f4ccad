"""From sealed images to committed steps on disk, and back.

``persist`` and ``commit`` make a step official by its ``manifest``; ``discovery`` finds the steps
that can be loaded; ``restore`` loads one. Nothing here knows Prefect, Ray, SQL or training.
"""
