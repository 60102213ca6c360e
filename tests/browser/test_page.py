"""What the page shows, at both sizes, in light and dark, by keyboard, and to somebody who does not see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import TOKEN, Page
from tests.harness.browser import browser
from tests.harness.expect import wait_until
from tests.harness.rigs.dashboard import vitals
from tests.harness.rigs.peers import PEERS

pytestmark = pytest.mark.browser

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def shown(driver: Any, true: Callable[[], Any], what: str) -> Any:
    """Wait until the page shows something."""
    return wait_until(true, what=what)


def text(driver: Any, selector: str) -> str:
    """The text of the first such element."""
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def figure(driver: Any, name: str) -> str:
    """One of the figures at the top."""
    found = "[...document.querySelectorAll('#figures div')].find((one) => one.firstChild.textContent === arguments[0])"
    return str(driver.execute_script(f"return {found}?.lastChild.textContent ?? ''", name))


def opened(driver: Any, page: Page) -> None:
    """Open the page, and wait for the run."""
    driver.get(page.url)
    shown(driver, lambda: figure(driver, "Step") == "2", "the run's step")


def faults(driver: Any, page: Page) -> list[str]:
    """What the browser complained about, but that a page before this one has lost its dashboard."""
    said = [str(entry["message"]) for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    return [line for line in said if line.startswith(page.url) or not line.startswith("http://127.0.0.1:")]


def test_values_change_while_the_run_goes_on(page: Page, wide: Any) -> None:
    opened(wide, page)
    assert figure(wide, "Peers") == "5"
    page.advance(4)
    shown(wide, lambda: figure(wide, "Step") == "6", "the newest step")
    assert figure(wide, "Peers") == "3"
    assert "mole was lost" in text(wide, "#churn-log")
    assert "vole left in order" in text(wide, "#churn-log")
    cards = wide.execute_script("return [...document.querySelectorAll('.card strong')].map((one) => one.textContent)")
    assert sorted(cards) == ["heron", "otter", "tern"]
    assert "12" in text(wide, "#shares tbody tr")
    assert "✕" in text(wide, "#churn")
    assert wide.title.startswith("6 · ")
    assert not faults(wide, page)


def test_who_was_lost_is_announced(page: Page, wide: Any) -> None:
    opened(wide, page)
    assert text(wide, "#announce") == ""
    page.advance(1)
    shown(wide, lambda: text(wide, "#announce") == "mole was lost, step 3", "the announcement")
    live = wide.execute_script("return document.getElementById('announce').ariaLive")
    assert live == "polite"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_fits_and_can_be_read_at_both_sizes_in_light_and_dark(page: Page, width: int, dark: bool) -> None:
    with browser(width=width, dark=dark) as driver:
        opened(driver, page)
        page.advance(2)
        shown(driver, lambda: "mole was lost" in text(driver, "#churn-log"), "a loss")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        behind = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (behind == "rgb(13, 17, 23)") == dark
        driver.execute_script("document.querySelector('details').open = true")
        assert driver.execute_script(CONTRAST) == []
        driver.find_element("css selector", ".card").click()
        assert driver.execute_script(CONTRAST) == []
        assert not faults(driver, page)


def test_every_control_has_a_name_and_a_role(page: Page, wide: Any) -> None:
    opened(wide, page)
    controls = wide.find_elements("css selector", "a, button, input, summary, [tabindex='0']")
    visible = [one for one in controls if one.is_displayed()]
    assert len(visible) > 12
    for one in visible:
        assert one.aria_role not in ("", "generic", "none"), one.get_attribute("outerHTML")
        assert one.accessible_name.strip(), one.get_attribute("outerHTML")


def test_everything_is_reached_by_keyboard(page: Page, wide: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(wide, page)
    body, seen = wide.switch_to.active_element, []
    for _ in range(40):
        body.send_keys(Keys.TAB)
        body = wide.switch_to.active_element
        name = body.get_attribute("id") or body.get_attribute("class") or body.text
        if body.tag_name == "body":
            break
        seen.append(name)
    assert seen[0] == "skip"
    for wanted in ("Swarm", "card", "loss", "speed", "churn-log", "moves-log", "events-log"):
        assert any(wanted in one for one in seen), (wanted, seen)
    card = wide.find_element("css selector", ".card")
    card.send_keys(Keys.ENTER)
    assert wide.find_element("css selector", "dialog").is_displayed()
    assert "Peer id" in text(wide, "#peer-facts")
    wide.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not wide.find_element("css selector", "dialog").is_displayed()
    assert wide.switch_to.active_element.get_attribute("class").startswith("card"), "back to where one was"
    chart = wide.find_element("id", "loss")
    wide.execute_script("arguments[0].focus()", chart)
    wide.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert text(wide, "#readout").startswith("Step 1: loss ")


def test_peer_that_stalls_and_comes_back_is_told_and_what_counts_since_when(page: Page, wide: Any) -> None:
    said = {PEERS[name]: vitals() for name in ("otter", "heron", "tern", "vole")}
    page.source.left = 0
    opened(wide, page)
    assert "counted since step 1." in text(wide, "#contributions p")
    heads = [one.text for one in wide.find_elements("css selector", "#shares th[scope=col]")]
    assert heads == ["Peer", "Holds", *["Microbatches", "Tokens", "Share"] * 2]
    page.source.extra = {"members": [], "vitals": said, "unanswered": {PEERS["mole"]: "stalled"}}
    page.advance(3)
    shown(wide, lambda: "mole does not answer" in text(wide, "#churn-log"), "the silence")
    assert "though its connection stands" in text(wide, ".card.bad .why")
    assert "stalled" in text(wide, ".card.bad .what")
    assert "○" in text(wide, "#churn")
    page.source.extra = {"members": [], "vitals": said | {PEERS["mole"]: vitals()}, "unanswered": {}}
    page.advance(3)
    shown(wide, lambda: "mole is back" in text(wide, "#churn-log"), "the return")
    page.advance(20)
    shown(wide, lambda: text(wide, "#state") == "stalled", "that no step closes")
    assert text(wide, "#why").startswith("no step has closed for ")
    assert not faults(wide, page)


def test_page_whose_dashboard_is_away_does_not_look_alive(page: Page, wide: Any) -> None:
    opened(wide, page)
    page.loop.call_soon_threadsafe(page.dashboard.task.cancel)
    shown(wide, page.dashboard.task.done, "the end of the dashboard")
    shown(wide, lambda: text(wide, "#state") == "not connected", "that it is not connected")
    assert "What is shown is from" in text(wide, "#connection")


def test_token_is_asked_for_once_and_kept_out_of_the_address(locked_page: Page, wide: Any) -> None:
    locked_page.advance(2)
    wide.get(locked_page.url)
    shown(wide, lambda: wide.find_element("id", "token").is_displayed(), "the question for a token")
    field = wide.find_element("id", "token")
    field.send_keys("not-this-one")
    field.submit()
    shown(wide, lambda: text(wide, "#connection") == "that token does not fit", "the refusal")
    field.send_keys(TOKEN)
    field.submit()
    shown(wide, lambda: figure(wide, "Step") == "2", "the run")
    wide.execute_script("sessionStorage.clear()")
    wide.get("about:blank")
    wide.get(f"{locked_page.url}#token={TOKEN}")
    shown(wide, lambda: figure(wide, "Step") == "2", "the run")
    assert TOKEN not in wide.current_url


def test_names_with_markup_are_text(page: Page, wide: Any) -> None:
    name = "<img src=x onerror=document.title='gone'>"
    page.source.extra = {"members": [
        {"peer": "12D3KooWevil", "name": name, "role": "stage", "part": "stage-0", "state": "member", "link": "direct",
         "copies": [], "region": "", "lost": "", "addresses": []},
    ]}  # fmt: skip
    opened(wide, page)
    page.advance(1)
    shown(wide, lambda: name in text(wide, "#parts"), "the name as text")
    assert wide.execute_script("return document.querySelectorAll('img').length") == 0
    assert wide.title != "gone"


def test_page_goes_on_after_the_dashboard_was_away(page: Page, wide: Any) -> None:
    opened(wide, page)
    feed = page.dashboard.feed
    page.loop.call_soon_threadsafe(feed.close)  # every stream is ended
    shown(wide, lambda: "trying again" in text(wide, "#connection"), "that it tries again")
    shown(wide, lambda: text(wide, "#connection") == "", "that it is back")
    page.advance(1)
    shown(wide, lambda: figure(wide, "Step") == "3", "the newest step")
