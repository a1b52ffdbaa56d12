"""The audit log over HTTP: the layer that notes calls, and the path that shows its state."""
