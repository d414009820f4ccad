"""Versions of the weights as folders, for engines that load a model or deltas from a disk."""
