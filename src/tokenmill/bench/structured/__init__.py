"""What becomes of JSON schemas: which are taken, what their grammars let through, and whether answers fit them."""
