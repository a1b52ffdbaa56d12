"""Where the time of a decode step and of a served request goes: `tokenmill bench profile`."""
