"""What the HTTP API is, in tables of words; the OpenAPI document and a page of it, made of these when asked for."""
