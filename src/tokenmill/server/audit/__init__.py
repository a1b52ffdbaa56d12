"""The audit log over HTTP: the layer that notes calls, the options of the log, and the path that shows its state."""
