"""Closing a step: the loop, its leader's side and its members' side."""
