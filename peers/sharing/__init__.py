"""Take part on a machine that is used for other things: limits, pauses, and coming back by itself."""
