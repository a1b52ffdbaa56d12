"""Service level objectives: what requests ask for, what their traffic shows, and whether it was met."""
