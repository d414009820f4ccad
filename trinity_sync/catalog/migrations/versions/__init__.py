"""One module per schema."""
