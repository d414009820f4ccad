"""What a save costs, next to the physical limit and the usual way, in the same run."""
