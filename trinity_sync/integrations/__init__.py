"""trinity_sync in other people's trainers: a module for each of them, none needed by the others.

A module imports its library when it is imported itself, and nothing else here imports it.
"""
