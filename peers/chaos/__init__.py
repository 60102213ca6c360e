"""Faults thrown at a swarm on purpose: what, when, in which world, and what became of it."""
