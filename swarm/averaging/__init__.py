"""Averaging: who groups with whom, and the exchange that gives all members of a group the same bits."""
