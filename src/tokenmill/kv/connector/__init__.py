"""What connects engines and workers to KV that is kept elsewhere."""
