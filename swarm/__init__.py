"""What many peers agree on: protocols, algorithms, models. A library: no main, no environment, no globals."""

from typing import Final

__version__ = "0.1.0"
WIRE_VERSION: Final = 2
