"""The HTTP APIs that are spoken here: a folder for each, and what they share.

An API reads bodies into a `Call` (`parse.py`) and writes what came of it as bytes (`shape.py`). What lies between,
admission, the engine and the connection, is `server`, which it does not know.

endpoints     every body that is read: by which parser
fields        one JSON object, field by field
jobs          heavy work on bodies and texts, for the sandboxed process
errors        failures as each API tells them"""
