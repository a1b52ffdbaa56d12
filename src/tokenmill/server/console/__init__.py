"""The console: pages in a browser that show and steer this server through its own HTTP API.

pages      the static files, open to all: there is no data in them
kv         what the engines' prefix caches hold
reports    results of benchmarks in one folder
"""
