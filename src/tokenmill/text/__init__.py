"""Between text and token ids: tokenizer, chat template, incremental detokeniser, stop strings.

Runs in the front end. Knows nothing of engines, HTTP or kernels, and never imports numpy.
"""
