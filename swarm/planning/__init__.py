"""Predictions of what things cost."""
