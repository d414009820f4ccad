"""Trinity-RFT: `switch` replaces the saves and weight syncs of its trainer and explorer."""
