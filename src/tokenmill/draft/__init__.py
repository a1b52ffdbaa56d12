"""Makes drafters off line, from texts: what `tokenmill draft` writes and a server drafts from. Nothing here serves."""
