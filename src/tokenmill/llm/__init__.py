"""A model in this process, for programs: `LLM`, and `AsyncLLM` for asyncio programs.

The second wiring of the rooms, beside `cli.serve`. Nothing here is imported before it is used.
"""
