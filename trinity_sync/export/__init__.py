"""From the shards of a committed step to a folder that ``from_pretrained`` loads.

``shards`` puts whole tensors together from what the ranks saved, ``naming`` says what Hugging Face
calls them, ``writing`` writes them a file at a time, ``step`` is the export of a step as a whole.
No training is needed for it, nor Ray, nor Prefect.
"""
