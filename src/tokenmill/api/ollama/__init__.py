"""Ollama's API: lines of JSON instead of events, options under its names, durations in nanoseconds."""
