"""Failure detection: asking peers whether they are alive, and judging by their answers."""
