"""The checkpoints of this machine: written, listed, verified, pulled, resumed from."""
