"""Plug-ins: what installed packages add, under names that a setting or a checkpoint says."""
