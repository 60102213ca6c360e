"""Throw faults at a swarm on purpose: scenarios, the worlds they are played in, and the verdict."""
