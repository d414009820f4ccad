"""Tensors: private names of torch, copies, loading, shards. Knows no file of a job."""
