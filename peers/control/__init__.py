"""The control socket of a running peer: its server, its client, and what it answers."""
