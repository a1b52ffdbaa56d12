"""Token ids in, token ids out: vLLM's /inference/v1/generate and SGLang's /generate."""
