"""``python -m peers.cli`` is ``swarm``."""

from peers.cli import main

if __name__ == "__main__":
    main()
