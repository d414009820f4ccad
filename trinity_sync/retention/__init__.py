"""Which steps are removed, and when: pure policies, and the one way that steps are pruned."""
