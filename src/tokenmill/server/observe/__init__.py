"""How what is observed gets in and out: a layer for traces, an observer of the client of engines, and its paths."""
