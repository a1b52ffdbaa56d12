"""Servers of others that answer for a model: which there are, how a call is passed to one, what is counted of it."""
