"""The worker: runs step plans on a model. Knows sequences by number only; knows no request, policy or HTTP."""
