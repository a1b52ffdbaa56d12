"""Measures: engines against each other in one run, with the state of the machine beside every figure.

What is measured in process is handed in by `cli`; this room knows engines only through the few methods it calls.
"""
