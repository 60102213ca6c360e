"""A trainer's side of a journey: routing, deadlines, repair, and what it retains."""
