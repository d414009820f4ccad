"""The parts of the reference that are made from the code at build time."""

from collections.abc import Callable

GENERATORS: dict[str, Callable[[], str]] = {}
"""Makers of Markdown, by the name in ``<!-- generated: NAME -->``."""
