"""What many peers agree on: protocols, algorithms, models. A library: no main, no environment, no globals."""

__version__ = "0.1.0"
WIRE_VERSION = 1
