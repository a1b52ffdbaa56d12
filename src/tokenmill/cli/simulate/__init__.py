"""Simulating a service from the command line."""
