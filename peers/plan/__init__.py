"""What ``swarm plan`` is given, and what it says."""
