"""Plugins that Trinity-RFT loads from ``TRINITY_PLUGIN_DIRS``."""
