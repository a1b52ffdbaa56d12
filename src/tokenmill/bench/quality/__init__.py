"""What a model gets right, with stated errors: `tokenmill bench quality`."""
