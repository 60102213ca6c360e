"""The libp2p daemon: its process, its connections, and the streams that it carries."""
