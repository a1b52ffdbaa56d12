"""What an operator sees of a running server: its load, its requests and their timelines, its engines' last steps."""
