"""Closing a step as the leader of one of its terms."""
