"""KV that goes from one worker's pools to another's: offered, asked for, copied, acknowledged."""
