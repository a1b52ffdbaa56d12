"""The vocabulary that all rooms share: nouns, ports, errors, units.

It imports the standard library only and has no behaviour but validation, so that every room can import it cheaply.
"""
