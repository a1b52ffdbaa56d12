"""Calls of tools: how each model family writes them, and how they are read back. Knows no API and no engine."""
