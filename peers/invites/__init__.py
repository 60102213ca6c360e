"""Invites: all that a machine needs to find a run and to know that it is the one, as a word or in a file."""
