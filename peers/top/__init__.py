"""A run in the terminal: ``swarm top``."""
