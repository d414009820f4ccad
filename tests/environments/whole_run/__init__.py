"""A small asynchronous GRPO run of real processes, which are killed until its data is counted."""
