"""Closing a step as a member: what it accepts, and what it has done for the open step."""
