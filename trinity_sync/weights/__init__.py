"""Weight sync from the trainer to rollout workers.

A version of the weights is a step of the trainer. Readers load it from the trainer's shared memory,
from a commit, or receive it by broadcast. A registry, of files or in the Synchronizer, tells where
each version is; it never holds tensors.
"""
