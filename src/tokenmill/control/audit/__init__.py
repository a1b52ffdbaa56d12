"""The audit log: who did what, as a chain of entries whose head is signed. docs/operate/security.md says what it
proves."""
