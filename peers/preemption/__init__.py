"""Notices that this machine is taken back: watched where a person asks for it, and acted on in time."""
