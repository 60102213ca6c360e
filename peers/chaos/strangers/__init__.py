"""Peers without a credential that attack the peers of a play, as a program that the worlds of chaos start."""
