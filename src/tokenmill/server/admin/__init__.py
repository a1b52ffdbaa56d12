"""Paths for operators: tenants and their keys, usage, workers. What they show and change is in `control`."""
