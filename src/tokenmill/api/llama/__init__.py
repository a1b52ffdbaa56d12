"""llama-server's own API beside OpenAI's: /completion, /infill, and what tells of the server."""
