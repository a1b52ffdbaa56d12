"""How what is observed gets in and out: a layer for traces, and its paths."""
