"""Cost models of steps, fitted to step logs and to what clients saw of a server."""
