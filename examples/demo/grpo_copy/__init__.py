"""GRPO on a copy-the-token task: veRL's real FSDP2 engine on CPU, small enough for a laptop."""
