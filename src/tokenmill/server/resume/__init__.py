"""Streams that outlive their connection and this process (`--resume-file`).

layer       a call runs apart from its connections; GET /v1/requests/ID/stream
stream_log  the events of one stream, numbered, and who reads them
registry    the streams under way, and those of an earlier process that go on
store       the file, and what is kept of a call
"""
