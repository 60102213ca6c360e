"""The real network: authenticated calls between peers, and the directory of peers."""
