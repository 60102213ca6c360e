"""The terminal's view of one run: :class:`TopApp`, with Textual.

A small terminal shows one pane below the header and the curve; a large one shows all four at once. What is drawn comes
from :class:`peers.dashboard.feed.StateFeed`, as for the dashboard's page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Grid, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from peers.dashboard.feed import EVERY_S, StateFeed
from peers.top.drawing import (
    BUSY,
    IDLE,
    MARKS,
    WAITING,
    Drawing,
    contributions,
    grid,
    happened,
    header,
    plot,
    spark,
)
from swarm.clock import Clock
from swarm.errors import SwarmError

PANES: Mapping[str, Drawing] = {
    "Replicas": grid,
    "Loss": plot,
    "Contributions": contributions,
    "Events": happened,
}
"""The panes by their titles; their places in it are their keys."""
LARGE = (140, 36)
"""Columns and rows from which on all panes are shown."""

HELP = f"""\
Keys
  1 2 3 4          show a pane: replicas, loss, contributions, events
  t, tab, ← →      the next pane, the one before (shift-tab)
  ↑ ↓ PgUp PgDn    scroll in it
  p                hold the picture, and go on
  d                dark or light
  ?                this page; q  quit

Replicas, by the part of the model that they hold
  queue            microbatches that wait there
  {BUSY}{WAITING}{IDLE} and %        how its device spends its time: busy, waiting for
                   microbatches under way, idle; % is how busy
  link             how the peer asked reaches it: direct or relayed
  on probation        that trainer gives it little work after a failure

Loss: the marks below the curve say who came and went:
  {"   ".join(f"{mark} {what}" for what, mark in MARKS.items())}

Contributions: what close records count. computed: microbatches whose
gradient it held; brought: those that it fed as a trainer.

– is what nobody here can tell."""


class RunPane(VerticalScroll):
    """One pane: what a function draws of the newest state, as wide as it is."""

    def __init__(self, title: str, drawing: Drawing, number: int) -> None:
        super().__init__(id=f"pane-{number}")
        self.border_title = f"{number} {title}"
        self._drawing, self._state = drawing, dict[str, Any]()
        self._text, self._drawn = Static(markup=False), Content()

    def compose(self) -> ComposeResult:
        """See :class:`textual.widget.Widget`."""
        yield self._text

    def show(self, state: Mapping[str, Any]) -> None:
        """Draw a state, unless nobody sees it."""
        self._state = dict(state)
        size = self.scrollable_content_region.size
        if self.display and size.width > 0:
            drawn = self._drawing(state, size.width, size.height)
            if not drawn.is_same(self._drawn):  # else nothing is to be painted
                rows = drawn.plain.count("\n")
                self._text.update(drawn, layout=rows != self._drawn.plain.count("\n"))
                self._drawn = drawn

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self._state:
            self.show(self._state)


class HelpScreen(ModalScreen[None]):
    """What the keys do and the words mean."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,q,enter", "dismiss", "Close"),
    ]

    def compose(self) -> ComposeResult:
        """See :class:`textual.screen.Screen`."""
        with VerticalScroll(id="help"):
            yield Static(HELP, markup=False)


class TopApp(App[BaseException]):
    """The view of what ``feed`` knows. Its result is what ended it, None for who quits."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: auto; background: $panel; padding: 0 1; }
    #spark { height: 2; padding: 0 1; }
    #tabs { height: 1; background: $panel; padding: 0 1; }
    #panes { grid-size: 1 1; height: 1fr; }
    RunPane { display: none; height: 1fr; scrollbar-gutter: stable; scrollbar-size-vertical: 1; padding: 0 1; }
    RunPane Static { text-wrap: nowrap; text-overflow: clip; }
    RunPane.selected { display: block; }
    .large #spark, .large #tabs { display: none; }
    .large #panes { grid-size: 2 2; grid-columns: 3fr 2fr; }
    .large RunPane { display: block; border: round $foreground 40%; padding: 0; }
    .large RunPane.selected { border: round $primary; border-title-style: bold reverse; }
    HelpScreen { align: center middle; }
    #help { width: 78; max-width: 100%; height: auto; max-height: 100%; border: round $primary; padding: 0 1; }
    #help { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q,ctrl+c", "quit", "Quit"),
        ("question_mark", "help", "Help"),
        ("p", "hold", "Pause"),
        ("t,right", "turn(1)", "Next pane"),
        ("left", "turn(-1)", "Pane before"),
        ("d", "shade", "Dark/light"),
        *((str(number), f"choose({number})", title) for number, title in enumerate(PANES, 1)),
    ]

    def __init__(self, feed: StateFeed, clock: Clock) -> None:
        super().__init__()
        self._feed, self._clock = feed, clock
        self._state: Mapping[str, Any] = feed.state()
        self._chosen, self._paused = 1, False

    def compose(self) -> ComposeResult:
        """See :class:`textual.app.App`."""
        yield Static(id="header", markup=False)
        yield Static(id="spark", markup=False)
        yield Static(id="tabs", markup=False)
        with Grid(id="panes"):
            for number, (title, drawing) in enumerate(PANES.items(), 1):
                yield RunPane(title, drawing, number)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to follow the run."""
        self.action_choose(self._chosen)
        self.run_worker(self._follow())

    def on_resize(self, event: events.Resize) -> None:
        """Show all panes where there is room."""
        self.screen_stack[0].set_class(event.size.width >= LARGE[0] and event.size.height >= LARGE[1], "large")
        self.call_after_refresh(self._draw)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Mark the pane that a click or the tab key chose."""
        if isinstance(event.widget, RunPane):
            self._mark(int(str(event.widget.id).rpartition("-")[2]))

    async def _follow(self) -> None:
        """Take what is new every second. What looks does so in threads, so keys are obeyed meanwhile."""
        while True:
            try:
                await self._feed.update()
            except SwarmError as error:  # there is nothing to look at any more
                self.exit(error)
                return
            state = self._feed.state()
            if not self._paused:
                self._state = state
                self._draw()
            await self._clock.sleep(EVERY_S)

    def _draw(self) -> None:
        base = self.screen_stack[0]
        width = max(1, self.size.width - 2)
        base.query_one("#header", Static).update(header(self._state, width, paused=self._paused))
        if not base.has_class("large"):
            base.query_one("#spark", Static).update(spark(self._state, width))
        for pane in base.query(RunPane):
            pane.show(self._state)

    def _mark(self, number: int) -> None:
        """Have a pane be the one that is chosen."""
        self._chosen = number
        tabs: list[str | tuple[str, str]] = []
        for place, title in enumerate(PANES, 1):
            tabs += [(f" {place} {title} ", "bold reverse" if place == number else ""), " "]
        base = self.screen_stack[0]
        base.query_one("#tabs", Static).update(Content.assemble(*tabs))
        for pane in base.query(RunPane):
            pane.set_class(pane.id == f"pane-{number}", "selected")
        self.call_after_refresh(self._draw)

    # --- keys ----------------------------------------------------------------------------------------------------

    def action_choose(self, number: int) -> None:
        """Go to a pane."""
        self._mark(number)
        self.screen_stack[0].query_one(f"#pane-{number}", RunPane).focus()

    def action_turn(self, by: int) -> None:
        """Go to the next pane, or the one before."""
        self.action_choose((self._chosen - 1 + by) % len(PANES) + 1)

    def action_focus_next(self) -> None:
        """The tab key does the same, whether a pane is in sight or not."""
        self.action_turn(1)

    def action_focus_previous(self) -> None:
        """See :meth:`action_focus_next`."""
        self.action_turn(-1)

    def action_hold(self) -> None:
        """Hold the picture, or go on with the newest."""
        self._paused = not self._paused
        if not self._paused:
            self._state = self._feed.state()
        self._draw()

    def action_shade(self) -> None:
        """Change between dark and light."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    async def action_help(self) -> None:
        """Explain keys and words."""
        self.push_screen(HelpScreen())
