"""`tokenmill calibrate`: from logs of steps to a cost model of them."""
