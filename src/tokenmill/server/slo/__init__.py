"""Service level objectives of requests: what bodies ask for, the paths that show them, and who has the idle time."""
