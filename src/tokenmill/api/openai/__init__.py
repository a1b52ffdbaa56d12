"""OpenAI's API, with vLLM's fields and endpoints beside it: chat, completions, /tokenize and /detokenize."""
