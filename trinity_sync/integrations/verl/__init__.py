"""veRL: `switch` puts saves of ours into its trainers, for the length of the process."""
