"""Integrations: a module for each library, independent of the others but for ``trl``.

A module imports its library when it is imported itself; no other module here imports it. TRL's
trainers are those of Hugging Face with a vLLM server, so ``trl`` uses both.
"""
