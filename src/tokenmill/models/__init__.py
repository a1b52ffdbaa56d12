"""Models: what a checkpoint's numbers mean, and the forward pass written in the kernel seam's functions.

Knows architectures and tensor names; knows nothing of sequences, schedules or sampling.
"""
