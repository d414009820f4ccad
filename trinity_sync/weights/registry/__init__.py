"""The version registry: its rules (`versions`), and its waits and state file (`event_loop`)."""
