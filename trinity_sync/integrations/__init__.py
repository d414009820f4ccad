"""Integrations with trainers: a module for each library, independent of the others.

A module imports its library when it is imported itself; no other module here imports it.
"""
