"""Streams that outlive their connection and this process (`--resume-file`).

layer   a call runs apart from its connections        line    the events of one stream, numbered, and who reads them
book    the streams under way, and those of an earlier process that go on        store   the file
record  what is kept of a call                        routes  GET /v1/requests/ID/stream
"""
