"""The version registry: rules (`versions`), waits and state file (`event_loop`), `protocol`."""
