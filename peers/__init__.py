"""The programs of one machine: the command `swarm`, one peer as a process, and local runs."""
