"""The model: its configuration, its parts, and their forward and backward passes."""
