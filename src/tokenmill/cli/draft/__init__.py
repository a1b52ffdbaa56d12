"""`tokenmill draft ...`: what drafts for a model, made off line."""
