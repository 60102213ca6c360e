"""What one machine runs: the command `swarm`, one peer as a process, and local runs."""
