"""Retention: policies as pure functions, and the one implementation of prune."""
