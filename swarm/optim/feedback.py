"""What averaging has rounded off at one replica of a part, and owes its next contribution.

A codec of few bits loses much of a small gradient in each step. Where what it lost is added to the next contribution,
nothing is lost in the long run: the weights get the true sum, some of it a few steps late (error feedback: Seide et
al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847).

What is owed changes with the weights, never apart from them:

| event | what is owed afterwards |
|---|---|
| a step was averaged, once or repeatedly | as before: every attempt sends the same |
| its record is decided, and the prepared step swapped | what the attempt that gave its mean has left |
| its record voids the step | as before |
| a step that others averaged is swapped, or another state installed | nothing: some of it may have been sent |
| another replica leaves in order | what it owed as well, from the next step on |

In units of a gradient *sum*, as contributions are, so that it needs no weight; in `local` mode of a delta times its
tokens. There a void step takes what was learnt in it, and leaves what is owed. On the device thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.errors import Refused

MOST = 64.0
"""So much longer than what is owed here may be what another replica hands over: of honest ones, which see gradients of
one distribution, none is nearly as long."""


class ErrorFeedback:
    """Of one part; nothing is owed where the codec of the run feeds nothing back. Memory a parameter: 4 bytes, and 4
    more from averaging to swap."""

    def __init__(self) -> None:
        self.pending: Tensor | None = None
        """What is owed once the prepared step is swapped."""
        self._residual: Tensor | None = None
        self._inherited: Tensor | None = None

    @property
    def residual(self) -> Tensor | None:
        """Return what the next contribution has to bring, float32 (elements,) on the CPU, not to be changed; None for
        nothing."""
        return self._residual

    def added_to(self, sums: Tensor) -> Tensor:
        """Return the sums, which are changed, with what is owed."""
        return sums if self._residual is None else sums.add_(self._residual)

    def commit(self) -> None:
        """The prepared step was swapped."""
        self._residual, self.pending = self.pending, None
        self._take_over()

    def give_up(self) -> None:
        """The step was void."""
        self.pending = None
        self._take_over()

    def drop(self) -> None:
        """Another state was installed."""
        self._residual = self.pending = self._inherited = None

    def inherit(self, owed: Tensor) -> None:
        """Owe what a replica that left owed, too, from the next step on: this one's contribution may be under way, and
        every attempt at averaging it must send the same. Raises Refused where nothing is owed here to compare it with,
        or it is far longer."""
        if self._residual is None:
            raise Refused("this replica has averaged no step yet")
        mine, other = (float(torch.linalg.vector_norm(each)) for each in (self._residual, owed))
        if not other <= MOST * mine:
            raise Refused(f"what was rounded off has norm {other:.3g}, {mine:.3g} here")
        self._inherited = owed if self._inherited is None else self._inherited + owed

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is held now, and what is pending. Any thread may ask."""
        kept, pending = (self._residual, self._inherited), self.pending
        return [each for each in kept if each is not None], [] if pending is None else [pending]

    def _take_over(self) -> None:
        """A step is opened."""
        inherited, self._inherited = self._inherited, None
        if inherited is not None and self._residual is not None:
            self._residual = self._residual + inherited
