"""Mixing without waiting, for replicas that train apart: versions of a part, and push-sum."""
