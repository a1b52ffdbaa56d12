"""Which blocks are published and which no longer, as front ends and others are told."""
