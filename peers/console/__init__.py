"""Output for a person at a terminal: events and errors in words, and Ctrl-C."""
