"""Monitoring: events to a file, events from a file, and what they say about a run."""
