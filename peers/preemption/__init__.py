"""Watch for the notice that this machine is taken back, where a person asks for it, and leave in time."""
