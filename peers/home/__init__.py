"""Directories of this machine: the places of its peers, with their identities, and its runs."""
