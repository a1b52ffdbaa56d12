"""The sandbox: a process beside the front end that does what is heavy or hostile, within limits.

`parent` starts it and hands it jobs (api/jobs.py), `child` is what runs inside. docs/develop/decisions/sandbox.md has
the reasons.
"""
