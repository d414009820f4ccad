"""From the trainer to the rollout workers: versions of the weights, and the ways to get them.

A version is the trainer's step. The Synchronizer knows which version is where; it never holds
tensors. Readers take them from the trainer's shared memory, from a commit, or from a broadcast.
"""
