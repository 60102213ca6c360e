"""One part of the model on this peer: its weights and optimizer state, and for a part that is trained the open step.

:class:`PartState` is all that a copy of a part is: it has no module and no accumulator, for nothing computes with it.
:class:`TrainedPart` adds both. Everything here is synchronous and belongs on the device thread.

The state's flat vectors are on the host, whatever the device, and change in place: what a step will make of them is
hashed piece by piece and forgotten, and made again when the step is decided. So a part needs no second state, and:

* A graph made before a swap is of no use after it: its step is closed. torch refuses to go back through one. Only a
  part with a window of two steps makes each state's parameters a vector of their own: work of the step after the open
  one began with them, and goes on.
* A snapshot lends the vectors. While somebody holds one, the next swap makes new vectors beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from swarm.columns import joined
from swarm.errors import BugError, Refused, StateError, WrongStep
from swarm.ids import PartName, StepWork
from swarm.models.experts import TALLY
from swarm.models.family import PartModule
from swarm.models.layout import FlatLayout, install_weights, refresh_weights
from swarm.models.lora import Stored, frozen_tensors, install_base
from swarm.models.passes import (
    Bound,
    DeferredGradients,
    Gradients,
    Graph,
    run_backward,
    run_backward_input,
    run_embedding,
    run_forward,
    run_head,
    run_loss,
    summed,
)
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, PartSpec
from swarm.models.strips import strips_of
from swarm.optim.accumulate import Accumulator, AccumulatorDType, OpenSums
from swarm.optim.clipping import Lengths
from swarm.optim.update import ElementRun, StepNumbers, StepPlan, Update, Vectors, hashes_after, stay, take_step
from swarm.planning.costs import MemoryKind
from swarm.state.snapshot import Snapshot, root_of

MOST = 64.0
"""So much longer than what is owed here may be what another replica hands over: of honest ones, which see gradients of
one distribution, none is nearly as long."""


class ErrorFeedback:
    """What averaging has rounded off of a part's sum here, and owes the next contribution; nothing where the codec of
    the run feeds nothing back.

    A codec of few bits loses much of a small gradient in each step. Where what it lost is added to the next
    contribution, nothing is lost in the long run: the weights get the true sum, some of it a few steps late (error
    feedback: Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847). What is owed changes with the
    weights, never apart from them:

    | event | what is owed afterwards |
    |---|---|
    | a step was averaged, once or repeatedly | as before: every attempt sends the same |
    | its record is decided, and the prepared step swapped | what the attempt that gave its mean has left |
    | its record voids the step | as before |
    | a step that others averaged is swapped, or another state installed | nothing: some of it may have been sent |
    | another replica leaves in order | what it owed as well, from the next step on |

    In units of a gradient *sum*, as contributions are, so that it needs no weight; in `local` mode of a delta times its
    tokens. There a void step takes what was learnt in it, and leaves what is owed. Memory a parameter: 4 bytes, and 4
    more from averaging to swap.
    """

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


# --- the state alone: weights and what the optimizer keeps, and how an update changes them ----------------------------


@dataclass(frozen=True, slots=True)
class Parting:
    """What becomes of a part that stages share: with the close of the first step from ``step`` on its state is that of
    each of them, whose layouts are the same but for names. A function of the state alone, so that whoever holds one
    holds them all, and nothing travels."""

    step: int
    layouts: Mapping[PartName, FlatLayout]


_CPU = torch.device("cpu")


class PartState:
    """Empty until :meth:`install`; then it holds the state after step :attr:`step`. One thread at a time.

    Memory per parameter: 4 bytes for each of the optimizer's vectors, on the host: 12 with AdamW. While a snapshot is
    lent over a swap, as much again.
    """

    parting: Parting | None = None
    """Of a part that is shared for some steps only."""
    _kept = 0
    """How many vectors, from the first, must stay as they are when a step makes others of them, lent or not."""

    def __init__(self, spec: PartSpec, layout: FlatLayout, update: Update, device: torch.device = _CPU) -> None:
        """``device`` is where a step's heavy work may be done."""
        self.spec, self.layout = spec, layout.kept_by(update.vectors)
        self._update, self._device = update, device
        self._state: Vectors | None = None
        self._plan: StepPlan | None = None
        self._lent = WeakSet[Snapshot]()
        self._step = -1

    @staticmethod
    def of(spec: PartSpec, model: ModelConfig, update: Update) -> PartState:
        """An empty one on CPU, for a part of this model. Costs no memory yet."""
        family = family_of(model)
        return PartState(spec, family.layout(family.build(spec)), update)

    @property
    def empty(self) -> bool:
        """Return whether it holds no state yet."""
        return self._state is None

    @property
    def step(self) -> int:
        """The closed step whose result this part holds; 0 is the initial weights. Raises BugError before install."""
        self._installed()
        return self._step

    def install(self, snapshot: Snapshot) -> None:
        """Hold this state from now on, which is not copied; what was accumulated or prepared is dropped.

        Raises StateError, with nothing changed, when it is of another part, model or optimizer.
        """
        if snapshot.part != self.spec.name or snapshot.layout != self.layout:
            raise StateError(f"a snapshot of {snapshot.part} does not fit {self.spec.name} of this model")
        self._forget()
        self._become(snapshot.vectors, snapshot.step)
        self._lent = WeakSet([snapshot])

    def snapshot(self) -> Snapshot:
        """The state after :attr:`step`, lent: it stays what it is for as long as somebody holds it."""
        state = self._installed()
        for lent in self._lent:
            if lent.step == self._step:
                return lent
        snapshot = Snapshot(part=self.spec.name, step=self._step, layout=self.layout, vectors=state)
        self._lent.add(snapshot)
        return snapshot

    def parted(self, part: PartName) -> Snapshot:
        """The state after :attr:`step` as that of one of the stages that share it no more. It lends the vectors, and
        this part must not be swapped after it: there is nothing more to do with it."""
        assert self.parting is not None  # noqa: S101 - asked before
        return Snapshot(part=part, step=self.step, layout=self.parting.layouts[part], vectors=self._installed())

    def averaged(self, step: int) -> slice:
        """The elements whose mean closes this step."""
        return self._update.averaged(self.layout, step)

    def prepare(self, mean: Tensor, *, lr: float, clip: float, step: int, fed: bool = True) -> str:
        """Compute what the state after ``step`` will be; returns its digest, which the close record names; of one that
        stages part with (:class:`Parting`), that of each.

        ``mean`` is what the replicas agreed on, float32 on CPU, of what :meth:`averaged` says, the same bits on every
        one; it is kept, and must stay as it is, until the swap. Where nobody ``fed`` the part in the step, and
        nothing is averaged of earlier ones either, the state stays: no decay, and moments as they were. Preparing again
        replaces what was prepared. Raises BugError when ``step`` is not the one after :attr:`step`. Cost: a step of the
        optimizer and a hash of the state.
        """
        if step != self.step + 1:
            raise BugError(f"prepare of step {step} on a part at step {self.step}")
        numbers, state = StepNumbers(step=step, lr=lr, clip=clip), self._installed()
        self._plan = self._update.plan(state, mean, self.layout, numbers, self._device)
        if not fed and not bool(mean.any()):
            kept = {number: state[number] for number in self._plan.settled}
            self._plan = StepPlan((mean,), (ElementRun(0, self.layout.elements, stay),), settled=kept)
        parting, hashes = self.parting, hashes_after(self._plan, state)
        after = {self.spec.name: self.layout} if parting is None or step < parting.step else parting.layouts
        return joined(root_of(part, layout, hashes) for part, layout in after.items())

    def swap(self) -> None:
        """Take the prepared step, and the next one is open. Raises BugError when none is prepared. Cost: a step of the
        optimizer."""
        plan, state = self._plan, self._installed()
        if plan is None:
            raise BugError("swap without prepare")
        kept = len(state) if self._lent else self._kept
        after = tuple(self._new_like(vector) if at < kept else vector for at, vector in enumerate(state))
        take_step(plan, state, after)
        if kept == 0:
            self._stepped()
            self._open(self._step + 1)
        else:
            self._become(after, self._step + 1)
            self._lent = WeakSet()

    def give_up(self) -> None:
        """Nothing of the open step counts: what was accumulated or prepared is dropped, and the state that is held is
        the next step's as well."""
        self._open(self.step + 1)

    def discard(self) -> None:
        """Forget what was prepared; the open step stays as it is."""
        self._plan = None

    def tensors(self) -> dict[MemoryKind, list[Tensor]]:
        """Return what is held now, by kind, for who counts its storages, of which several tensors may share one. For
        that any thread may ask, while the device's goes on."""
        state, plan = self._state or (), self._plan
        return {
            "weights": [*state[:1]],
            "optimizer": [*state[1:]],
            "round": [] if plan is None else plan.tensors(),
        }

    def _forget(self) -> None:
        """Another state comes, which need not follow the one that is held."""

    def _new_like(self, vector: Tensor) -> Tensor:
        return torch.empty_like(vector)

    def _become(self, state: Vectors, step: int) -> None:
        """Hold other vectors from now on, those of the state after this step."""
        self._state = state
        self._open(step)

    def _stepped(self) -> None:
        """The vectors have changed."""

    def _open(self, step: int) -> None:
        """What is held is the state after this step, and the next one is open."""
        self._step, self._plan = step, None

    def _installed(self) -> Vectors:
        if self._state is None:
            raise BugError(f"{self.spec.name} has no weights yet")
        return self._state


# --- a part that is trained ------------------------------------------------------------------------------------------


class TrainedPart(PartState):
    """A stage or the private ends. Empty until :meth:`install`; then it holds the state after step :attr:`step`.

    Memory per parameter, with AdamW: 12 bytes of state on the host; on the device 4 (or 8) of accumulator, 2 of weights
    where ``compute`` is bfloat16, else 4 where the device is not the host, whose vector serves as weights. With a
    ``window`` of two, when the step after the open one is fed ahead, 8 more: an accumulator and the parameters of the
    state before, with which that step's early work is computed. Of several devices each has that of its share of what
    is cut (:mod:`swarm.models.strips`).
    """

    def __init__(
        self,
        spec: PartSpec,
        model: ModelConfig,
        update: Update,
        *,
        devices: Sequence[torch.device] = (_CPU,),
        accumulator: AccumulatorDType = "float32",
        window: int = 1,
    ) -> None:
        """Raises ConfigError where its layers cannot be cut across so many ``devices``."""
        family = family_of(model)
        self._module = family.build(spec)
        super().__init__(spec, family.layout(self._module), update, devices[0])
        number = spec.tensor if spec.tensor > 1 else len(devices)
        self.strips = strips_of(self._module, self.layout, family.tensor_plan, number, devices)
        self._sums = OpenSums(lambda: self._new_sum(accumulator), window)
        self._window = window
        self._kept = window - 1
        self._modules, self._versions = [self._module], dict[int, PartModule]()
        self._defers = False
        self.feedback = ErrorFeedback()

    def _new_sum(self, accumulator: AccumulatorDType) -> Accumulator:
        return Accumulator(self.layout, accumulator, self._device, self.strips)

    def install_base(self, stored: Mapping[str, Stored]) -> None:
        """Have the frozen weights of a part that trains adapters: once, before :meth:`install`. Raises StateError."""
        install_base(self._module, stored, self._device)

    # --- passes --------------------------------------------------------------------------------------------------
    # With the parameters that the work is to be computed with; without any, with those of the newest state.

    def checkpoint_activations(self, on: bool) -> None:
        """From the next forward on; see :attr:`~swarm.models.family.PartModule.activation_checkpointing`."""
        for module in self._modules:
            module.activation_checkpointing = on

    def defer_weight_gradients(self, on: bool) -> None:
        """Check whether :meth:`backward_input` leaves the weight gradients of linear layers to
        :meth:`backward_weights`, of forwards from the next one on. The same bits."""
        self._defers = on

    def forward(
        self, x: Tensor, *, seed: int | None, work: StepWork | None = None, graph: bool = True
    ) -> tuple[Tensor, Graph | None]:
        """See :func:`~swarm.models.passes.run_forward`. Raises WrongStep, as all passes, for work whose parameters are
        not held here."""
        return run_forward(self._module_for(work), x, seed=seed, graph=graph, defers=self._defers)

    def forward_loss(
        self, x: Tensor, targets: Tensor, *, seed: int | None, work: StepWork | None = None, graph: bool = True
    ) -> tuple[float, int, Graph | None]:
        """Hosted last stage; its backward takes no ``grad_output``. See :func:`~swarm.models.passes.run_loss`."""
        return run_loss(self._module_for(work), x, targets, seed=seed, graph=graph)

    def backward(self, graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, Gradients]:
        """See :func:`~swarm.models.passes.run_backward`. Adds nothing anywhere: :meth:`accumulate` does."""
        return run_backward(graph, grad_output)

    def backward_input(self, graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, DeferredGradients]:
        """The first half of :meth:`backward`; see :func:`~swarm.models.passes.run_backward_input`."""
        return run_backward_input(graph, grad_output)

    def backward_weights(self, rest: DeferredGradients) -> Gradients:
        """The second half. Adds nothing anywhere, as :meth:`backward`."""
        return rest.finish()

    def embed(self, tokens: Tensor, *, seed: int | None = None, work: StepWork | None = None) -> tuple[Tensor, Graph]:
        """Private ends: see :func:`~swarm.models.passes.run_embedding`."""
        return run_embedding(self._module_for(work), tokens, seed=seed)

    def loss(
        self, hidden: Tensor, targets: Tensor, *, work: StepWork | None = None
    ) -> tuple[float, int, Tensor, Gradients]:
        """Private ends: see :func:`~swarm.models.passes.run_head`."""
        return run_head(self._module_for(work), hidden, targets)

    def embed_backward(self, graph: Graph, grad: Tensor) -> Gradients:
        """Private ends: the embedding's gradient. Joined to :meth:`loss`'s it makes the microbatch's whole gradient."""
        return run_backward(graph, grad)[1]

    # --- the open steps ------------------------------------------------------------------------------------------

    def is_open(self, step: int) -> bool:
        """Return whether work of that step can be added."""
        return step in self._sums

    def computes(self, version: int) -> bool:
        """Return whether the parameters after that step are held. Any thread may ask."""
        return version in self._versions

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """Return what is accumulated in an open step. Raises WrongStep."""
        return self._sums[step].work

    def check(self, gradients: Gradients) -> None:
        """See :meth:`~swarm.optim.accumulate.Accumulator.check`. ``gradients`` are of one pass: one of a name. Any
        thread may."""
        self._sums.any.check(gradients)

    def accumulate(
        self, work: StepWork, gradients: Gradients, *, checked: bool = False, bound: Bound | None = None
    ) -> None:
        """Add to its step, once; see :meth:`~swarm.optim.accumulate.Accumulator.add`. Raises WrongStep for a closed
        one."""
        self._sums[work.step].add(work, summed(gradients), checked=checked, bound=bound)

    def lengths(self, step: int) -> Lengths:
        """See :attr:`~swarm.optim.accumulate.Accumulator.lengths`. Any thread may ask. Raises WrongStep."""
        return self._sums[step].lengths

    def see_trainers(self, secret: int) -> None:
        """Compare trainers' shares of sums (:class:`~swarm.optim.accumulate.Sketches`). ``secret`` is only this
        peer's."""
        self._sums.see_trainers(secret)

    def words(self, step: int, trainers: Sequence[str]) -> tuple[int, ...]:
        """See :meth:`~swarm.optim.accumulate.Accumulator.words`. Raises WrongStep."""
        return self._sums[step].words(trainers)

    def dropped(self, step: int) -> tuple[int, int]:
        """Return how many choices of experts found no room, of how many, in what is accumulated in an open step; twice
        0 where room is not limited. Raises WrongStep."""
        counts, views = torch.zeros(2, dtype=torch.float64), self.layout.views(self._sums[step].total)
        for name in self.layout.told:
            counts += views[name].double().cpu() / TALLY
        without, of = counts.round().tolist()
        return int(without), int(of)

    def reverse(self, work: StepWork, gradients: Gradients) -> None:
        """Undo an accumulation; see :meth:`~swarm.optim.accumulate.Accumulator.remove`."""
        self._sums[work.step].remove(work, summed(gradients))

    def take_all_out(self, step: int) -> None:
        """Take all out of an open step's sum. Raises WrongStep."""
        self._sums[step].reset()

    def gradient_sum(self, step: int | None = None) -> Tensor:
        """A CPU copy of the sum over what is accumulated in a step, else in the one after :attr:`step`,
        (layout.elements,) in the accumulator's dtype."""
        return self._sums[self.step + 1 if step is None else step].copied()

    def contribution(self, step: int, assigned: Set[StepWork], tokens: int) -> Tensor | None:
        """Return this replica's input to the round when ``assigned``, with so many target tokens, count for it: the sum
        of their gradients, and what is owed of earlier ones; None while anything else is in it, or one is missing. A
        copy, as :meth:`gradient_sum`."""
        return self.feedback.added_to(self.gradient_sum(step)) if self.accumulated(step) == assigned else None

    def prepare(
        self, mean: Tensor, *, lr: float, clip: float, step: int, fed: bool = True, left: Tensor | None = None
    ) -> str:
        """See :meth:`PartState.prepare`; ``left`` of our contribution is owed once the step is swapped."""
        digest = super().prepare(mean, lr=lr, clip=clip, step=step, fed=fed)
        self.feedback.pending = left
        return digest

    def swap(self) -> None:
        """See :meth:`PartState.swap`."""
        super().swap()
        self.feedback.commit()

    def give_up(self) -> None:
        """See :meth:`PartState.give_up`."""
        super().give_up()
        self.feedback.give_up()

    def install(self, snapshot: Snapshot) -> None:
        """See :meth:`PartState.install`."""
        super().install(snapshot)
        self.feedback.drop()

    def tensors(self) -> dict[MemoryKind, list[Tensor]]:
        """See :meth:`PartState.tensors`."""
        held = super().tensors()
        modules = [tensor for m in self._modules for tensor in (*m.trained_of().values(), *m.buffers())]
        frozen = frozen_tensors(self._module)
        kept, pending = self.feedback.tensors()
        return {
            **held,
            "weights": [*held["weights"], *modules],
            "gradients": [*self._sums.totals, *kept],
            "round": [*held["round"], *pending],
            "frozen": frozen,
        }

    # --- from state to state -------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._versions = {}
        self._sums.close()

    def _become(self, state: Vectors, step: int) -> None:
        older = {version: module for version, module in self._versions.items() if version > step - self._window}
        module = next((one for one in self._modules if all(one is not other for other in older.values())), None)
        if module is None:
            module = _beside(self._module)
            self._modules.append(module)
        self._compute_with(state[0], module)
        self._versions = {**older, step: module}
        super()._become(state, step)

    def _stepped(self) -> None:
        weights = self.layout.views(self._installed()[0])
        if self.strips is None:
            refresh_weights(self._module, weights)
        else:
            self.strips.refresh(self._module, weights)

    def _open(self, step: int) -> None:
        if step not in self._versions:  # the vectors have changed in place, or nothing has
            self._versions[step] = self._versions[self._step]
        self._versions = {version: m for version, m in self._versions.items() if version > step - self._window}
        super()._open(step)
        self._sums.open(step + 1)

    def _compute_with(self, params: Tensor, module: PartModule) -> None:
        """Have a module compute with these parameters from now on, float32 (elements,)."""
        weights = self.layout.views(params)
        if self.strips is None:
            install_weights(module, weights, requires_grad=True, device=self._device)
        else:
            self.strips.install(module, weights)

    def _module_for(self, work: StepWork | None) -> PartModule:
        self._installed()
        version = self._step if work is None else work.version
        if (module := self._versions.get(version)) is None:
            raise WrongStep(f"the parameters after step {version} are not held here")
        return module


def _beside(module: PartModule) -> PartModule:
    """Return another module of the same kind that shares all tensors with this one, until it is given others."""
    shared = [*module.parameters(), *module.buffers(), *frozen_tensors(module)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
