"""The kernel interface: some twenty array functions, a numpy reference that defines them, and the backends.

Arrays in, arrays out. No config, no request types, no global context.
"""
