"""The outside world: sockets and codecs between processes, the wall clock, entropy.

Everything here implements a port of `core`, and decides nothing about requests.
"""
