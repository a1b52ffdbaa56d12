"""The vocabulary every room shares: nouns, ports, errors, units.

Imports the standard library only, and holds no behaviour beyond validation, so that any room (and a simulation of a
thousand nodes) can import it for free.
"""
