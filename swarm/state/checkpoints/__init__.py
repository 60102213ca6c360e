"""Checkpoints on disk: written, verified, rotated, and handed out to others."""
