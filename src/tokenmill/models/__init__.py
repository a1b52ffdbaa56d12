"""Models: what a checkpoint's numbers mean, and the forward pass written in the functions of the kernel interface.

Knows architectures and tensor names; knows nothing of sequences, schedules or sampling.
"""
