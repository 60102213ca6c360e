"""The world in memory: the real deciders on a pretend network."""
