"""`tokenmill calibrate`: from logs of steps to a law of them."""
