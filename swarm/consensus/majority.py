"""How many voters decide. Pure."""

from __future__ import annotations

FEW = 5
"""So few voters decide by more than half of them, so that three can lose one of them, and five a stage of two."""


def majority(voters: int) -> int:
    """Return how many of so many voters decide: more than half, and from six on as many that any two such sets have two
    voters in common. One of them may say two things, the leader itself among them: of seven, four would not do, for it
    could have one record accepted by three others, and another by the other three. Even numbers have two in common by
    themselves; three and five do not."""
    return (voters + (voters > FEW)) // 2 + 1
