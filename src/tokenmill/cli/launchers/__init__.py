"""Who starts workers where: on other machines that is an existing engine's work (Ray here; deploy/kubernetes)."""
