"""Trinity-RFT: `switch` puts saves and weight syncs of ours into its trainer and explorer."""
