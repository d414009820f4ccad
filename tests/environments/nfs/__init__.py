"""A root on NFS, seen by two nodes: ``make nfs``."""
