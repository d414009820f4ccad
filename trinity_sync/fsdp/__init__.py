"""Saving and loading for veRL's FSDP and FSDP2 engines."""
