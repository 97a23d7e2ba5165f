"""The command line: its commands, documents in, records out, and what it shows."""
