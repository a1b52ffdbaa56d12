"""Load on an OpenAI-compatible server, and what its clients see.

A dataset and a schedule make a plan (pure, seeded); the player sends it through the client and records arrivals;
measure turns records into a `bench.result`. Nothing here knows which server it talks to.
"""
