"""One peer's time in a run: founding, joining, holding a part, copying others, leaving."""
