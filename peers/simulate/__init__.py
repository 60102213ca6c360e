"""What ``swarm simulate`` is given, plays and says."""
