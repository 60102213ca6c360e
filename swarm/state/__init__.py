"""The state of a part after a step: snapshots, downloads, checkpoints."""
