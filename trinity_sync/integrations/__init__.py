"""Integrations: a module for each library, independent of the others but for ``trl``.

A module imports its library when it is imported itself; no other module here imports it. ``trl``
uses those of Hugging Face and vLLM; all share `trainer_saves` and `import_hooks`.
"""
