"""The engine: a pure core (events in, effects out) and the short asynchronous shell around it."""
