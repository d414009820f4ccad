"""Steps to and from checkpoints of PyTorch's Distributed Checkpoint: nobody is locked in.

Planning, reading and writing are PyTorch's; what is here says where the parts of a step lie.
"""
