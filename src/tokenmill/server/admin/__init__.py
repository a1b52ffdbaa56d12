"""Paths for operators: what they look at and change. What is shown and changed is in `control`."""
