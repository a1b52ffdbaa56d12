"""Ollama's API: lines of JSON instead of events, options under its names, durations in nanoseconds.

parse      body -> Call                   shape    the JSON of answers, whole and line by line
catalog    which models there are         vectors  /api/embed and /api/embeddings
routes     which path leads where         form     names, times and durations as Ollama writes them
"""
