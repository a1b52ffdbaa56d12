"""Reads model files: GGUF, safetensors, Hugging Face folders, and the cache they are fetched into.

Every reader treats its input as hostile: sizes and offsets are checked against the file before anything is allocated,
and damage is a `BadCheckpoint` that names what is wrong. Knows nothing of models, tokenizers or kernels.
"""
