"""The folder for Trinity-RFT's ``TRINITY_PLUGIN_DIRS``; it loads what is in it."""
