"""The work of the commands of `swarm`, apart from parsing their options."""
