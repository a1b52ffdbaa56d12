"""The HTTP APIs that are spoken here: a folder for each, and what they share.

An API reads bodies into a `Call` (`parse.py`), has it answered (`routes.py`) and writes what came of it as bytes
(`shape.py`). What lies between, admission, engines and connections, it asks of the server (`port.py`), whose inside it
does not know.

endpoints     every body that is read: by which parser
fields        one JSON object, field by field
jobs          heavy work on bodies and texts, for the sandbox process
errors        failures as each API tells them"""
