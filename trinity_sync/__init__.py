"""Checkpoints for RL post-training that training does not feel."""
