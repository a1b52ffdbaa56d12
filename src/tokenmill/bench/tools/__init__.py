"""Calls of tools measured: whether they parse, fit their schemas and are the right ones."""
