"""Saving and loading for veRL's FSDP and FSDP2 engines."""

from trinity_sync.errors import from_extra

with from_extra("verl"):
    import verl  # noqa: F401
