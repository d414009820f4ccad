"""What a save costs, beside the physical limit and the usual way, in the same run."""
