"""Simulation: virtual time, a checkable toy model, seeded workloads. Runs the same engine as live serving."""
