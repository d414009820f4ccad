"""The process that commits saves where no stack is known; one for each spool of a node."""
