"""What the commands of `swarm` do, apart from parsing their options."""
