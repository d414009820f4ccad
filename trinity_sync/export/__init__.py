"""From the shards of a committed step to a folder that ``from_pretrained`` loads.

``shards`` puts whole tensors together from what the ranks saved, ``naming`` says what Hugging Face
calls them, ``writing`` writes them a file at a time, ``places`` says where they may go, ``step`` is
the export of a step as a whole, also where a trainer asked for it. No training is needed for it,
nor Ray, nor Prefect.
"""
