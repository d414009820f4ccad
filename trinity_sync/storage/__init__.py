"""From sealed images to a committed step on disk.

``writer`` moves bytes past the page cache and digests them, ``durable`` knows what survives a
power cut, ``manifest`` and ``iteration`` are the two things that make a step official, ``runs``
keeps an abandoned run from publishing, ``persist`` and ``commit`` put these together, ``steps``
answers what can be loaded, and ``restore`` loads it. Nothing here knows Prefect, Ray, SQL or
training.
"""
