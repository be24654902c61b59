"""The page of attention maps in a real browser, with mouse and key events, shows its arrays."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flaxformer_lite.plotting.attention_page import AttentionMap, html_page

SECONDS = 60  # the longest wait for any one answer of the browser
COMMANDS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
).split()
DANGEROUS = "</script><script>document.title='x'</script>"
SOURCE = ["▁Mon", "day", DANGEROUS, "a<b&\"c'", "\u202f\n\u00a0", "漢字", "</s>"]
TARGET = ["<s>", "▁Montag", ",", "", "<!--"]
TITLE = "</title><b>5 & 7</b> {{data}}"


def weights(layers: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """Returns different rows that sum to 1, in whole hundredths, which the page does not round."""
    rng = np.random.default_rng(queries * keys)
    return rng.multinomial(100, np.full(keys, 1 / keys), size=(layers, heads, queries)) / 100


# no end symbol; a token that is only white space is not aligned
COUNTED = np.arange(len(TARGET)) != 3, np.arange(len(SOURCE)) < 6
MAPS = [
    AttentionMap("encoder self-attention", SOURCE, SOURCE, weights(2, 3, len(SOURCE), len(SOURCE))),
    AttentionMap(
        "cross-attention", TARGET, SOURCE, weights(3, 2, len(TARGET), len(SOURCE)), COUNTED
    ),
]
LARGE = np.random.default_rng(0).dirichlet(np.ones(60), size=(4, 8, 60))


class Browser:
    """One tab, over the DevTools protocol: JSON messages with a zero byte, in 2 named pipes."""

    def __init__(self, command: str, folder: Path):
        self.events: list[dict[str, Any]] = []
        self._received, self._last_id, self._session = b"", 0, {}
        for name in ("commands", "answers"):
            os.mkfifo(folder / name)
        # Opened for both directions, a pipe does not wait for the other end.
        self._commands, self._answers = (
            os.open(folder / name, os.O_RDWR) for name in ("commands", "answers")
        )
        self._process = subprocess.Popen(
            [
                "sh",
                "-c",
                'exec "$@" 3<commands 4>answers',
                "sh",
                command,
                *FLAGS,
                f"--user-data-dir={folder}/profile",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self) -> None:
        """Opens the tab and subscribes to its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def close(self) -> None:
        """Ends the browser and the processes that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        finally:
            self._process.wait(SECONDS)
            os.close(self._commands)
            os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of one command; other messages are appended to `events`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._wait_for(lambda message: message.get("id") == self._last_id)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 1000) -> None:
        """Loads `url` again in a window of `width` by `height` pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        self._load("about:blank")  # a URL that differs only in its fragment would not be loaded
        self.events.clear()
        self._load(url)

    def js(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def move(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Moves the mouse over an element, to the given shares of its width and height."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, top, width, height = self.js(
            f"(({{x, y, width, height}}) => [x, y, width, height])({box})"
        )
        at = {"x": left + x * width, "y": top + y * height}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return at["x"], at["y"]

    def click(self, selector: str, **place: float) -> None:
        """Moves to an element and presses the left button."""
        x, y = self.move(selector, **place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """Presses and releases a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def _load(self, url: str) -> None:
        loader = self.call("Page.navigate", url=url)["loaderId"]
        self._wait_for(
            lambda event: (
                {"loaderId": loader, "name": "load"}.items() <= event.get("params", {}).items()
            )
        )

    def _wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Returns the first message for which `wanted` is true; those before it are events."""
        deadline = time.monotonic() + SECONDS
        while True:
            while b"\0" not in self._received:
                if not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[
                    0
                ]:
                    raise TimeoutError(f"The browser did not answer within {SECONDS} seconds.")
                self._received += os.read(self._answers, 1 << 16)
            text, self._received = self._received.split(b"\0", 1)
            message = json.loads(text)
            if wanted(message):
                return message
            self.events.append(message)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = next(filter(None, map(shutil.which, COMMANDS)), None)
    if command is None:
        pytest.skip(
            f"no browser: none of {', '.join(COMMANDS)} is installed (Debian: apt-get "
            "install chromium)"
        )
    browser = Browser(command, tmp_path_factory.mktemp("browser"))
    try:
        browser.start()
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_page(MAPS, title=TITLE), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def large_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokens = [f"▁token{i}" for i in range(60)]
    maps = [AttentionMap(name, tokens, tokens, LARGE) for name in ("encoder", "decoder", "cross")]
    path = tmp_path_factory.mktemp("large") / "page.html"
    path.write_text(html_page(maps, title="large"), encoding="utf-8")
    return path.as_uri()


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.js(
        f"Array.from(document.querySelectorAll('{selector}'), (found) => found.textContent)"
    )


def shown(browser: Browser) -> list[str]:
    """Returns the weight beside each key; '' if no query is selected."""
    return texts(browser, "#keys .weight")


def numbers(row: np.ndarray) -> list[str]:
    return [f"{weight:.2f}" for weight in row]


def choice(name: str, value: object) -> str:
    return f'input[name="{name}"][value="{value}"]'


def heat_map(browser: Browser) -> np.ndarray:
    """Returns the opacity of each cell of the heat map, 0 to 1."""
    width, height, pixels = browser.js(
        "(({width, height}, context) => [width, height, Array.from(context.getImageData(0, 0, "
        "width, height).data)])"
        "(document.querySelector('#heat canvas'), document.querySelector('#heat "
        "canvas').getContext('2d'))"
    )
    return np.array(pixels).reshape(height, width, 4)[..., 3] / 255


def test_the_page_shows_its_tokens_as_text_and_its_kinds_of_attention(browser, url):
    browser.open(url)
    signs = ["▁Mon", "day", DANGEROUS, "a<b&\"c'", "⟨202F⟩↵⟨00A0⟩", "漢字", "</s>"]
    assert texts(browser, "#map label") == [each.name for each in MAPS]
    assert texts(browser, "#layer label") == ["0", "1"]
    assert texts(browser, "#head label") == ["mean", "0", "1", "2"]
    assert texts(browser, "#token label") == ["all tokens", *signs]
    assert texts(browser, "#keys .name") == signs
    assert (
        browser.js("document.title")
        == TITLE
        == browser.js("document.querySelector('h1').textContent")
    )
    assert browser.js("document.querySelectorAll('script').length") == 2


@pytest.mark.parametrize(("number", "layer", "head", "token"), [(0, 1, 2, 3), (1, 2, 0, 4)])
def test_the_fragment_selects_map_layer_head_and_token(browser, url, number, layer, head, token):
    browser.open(f"{url}#map={number}&layer={layer}&head={head}&token={token}")
    each = MAPS[number]
    assert shown(browser) == numbers(each.weights_NHTS[layer, head, token])
    np.testing.assert_allclose(heat_map(browser), each.weights_NHTS[layer, head], atol=1 / 255)


@pytest.mark.parametrize(("layer", "head"), [(1, 0), (2, 1), (2, "mean")])
def test_the_page_lists_the_links_of_the_chosen_head_without_end_symbols(browser, url, layer, head):
    browser.open(f"{url}#map=1&layer={layer}&head={head}")
    of_layer = MAPS[1].weights_NHTS[layer, :, :, :6]
    keys = (of_layer.mean(axis=0) if head == "mean" else of_layer[head]).argmax(axis=-1)
    signs, names = texts(browser, "#keys .name"), texts(browser, "#token .name")[1:]
    linked = "; ".join(f"{names[i]} – {signs[key]}" for i, key in enumerate(keys) if i != 3)
    assert texts(browser, "#links") == [f"Links: {linked}."]
    browser.open(f"{url}#map=0")
    assert texts(browser, "#links") == [""]


@pytest.mark.parametrize(
    "address", ["", "#map=2&layer=-1&head=99&token=x", "#layer=1000&other=1&map="]
)
def test_an_invalid_fragment_selects_the_mean_of_the_first_layer(browser, url, address):
    browser.open(url + address)
    assert shown(browser) == [""] * len(SOURCE)
    np.testing.assert_allclose(
        heat_map(browser), MAPS[0].weights_NHTS[0].mean(axis=0), atol=1 / 255
    )


def test_the_page_follows_a_change_of_the_fragment(browser, url):
    browser.open(f"{url}#layer=1&head=0&token=2")
    browser.js("location.hash = '#map=1&layer=0&head=1&token=1'")
    deadline = time.monotonic() + SECONDS
    while shown(browser) != numbers(MAPS[1].weights_NHTS[0, 1, 1]):
        assert time.monotonic() < deadline, shown(browser)


def test_a_token_shows_its_weights_while_the_mouse_is_over_it(browser, url):
    browser.open(f"{url}#layer=1&head=0")
    weights_TS = MAPS[0].weights_NHTS[1, 0]
    assert shown(browser) == [""] * len(SOURCE)
    for token in (5, 2):
        browser.move(choice("token", token))
        assert shown(browser) == numbers(weights_TS[token])
        lines = browser.js(
            "Array.from(document.querySelectorAll('#lines g.on path'), (line) => "
            "line.getAttribute('d'))"
        )
        ends = [re.fullmatch(r"M0 ([\d.]+)C.* 100 ([\d.]+)", line).groups() for line in lines]
        assert ends == [
            (f"{token + 0.5}", f"{key + 0.5}") for key in np.flatnonzero(weights_TS[token])
        ]
        most = np.argmax(weights_TS[token])
        assert texts(browser, "#reading")[0].startswith("“")
        assert f"({weights_TS[token, most]:.2f})" in texts(browser, "#reading")[0]
    browser.move("h1")
    assert shown(browser) == [""] * len(SOURCE)


def test_a_click_selects_a_token_in_the_fragment_and_all_tokens_deselects_it(browser, url):
    browser.open(f"{url}#layer=1&head=0")
    browser.click(choice("token", 4))
    browser.move("h1")
    assert browser.js("location.hash") == "#map=0&layer=1&head=0&token=4"
    assert shown(browser) == numbers(MAPS[0].weights_NHTS[1, 0, 4])
    browser.click(choice("token", ""))
    assert browser.js("location.hash") == "#map=0&layer=1&head=0"
    assert shown(browser) == [""] * len(SOURCE)


def test_the_controls_select_map_layer_head_and_the_mean_of_the_heads(browser, url):
    browser.open(f"{url}#token=1")
    each = MAPS[1]
    browser.click(choice("map", 1))
    assert texts(browser, "#layer label") == ["0", "1", "2"] and texts(browser, "#head label") == [
        "mean",
        "0",
        "1",
    ]
    browser.click(choice("layer", 2))
    browser.click(choice("head", 1))
    assert shown(browser) == numbers(each.weights_NHTS[2, 1, 1])
    np.testing.assert_allclose(heat_map(browser), each.weights_NHTS[2, 1], atol=1 / 255)
    browser.click(choice("head", "mean"))
    mean_TS = each.weights_NHTS[2].mean(axis=0)
    np.testing.assert_allclose(np.array(shown(browser), float), mean_TS[1], atol=0.00501)
    np.testing.assert_allclose(heat_map(browser), mean_TS, atol=1 / 255)
    assert browser.js("location.hash") == "#map=1&layer=2&head=mean&token=1"


def test_the_heat_map_shows_the_row_below_the_mouse_and_a_click_selects_it(browser, url):
    browser.open(f"{url}#map=1&layer=1&head=1")
    rows = len(TARGET)
    browser.move("#heat canvas", y=2.5 / rows)
    assert shown(browser) == numbers(MAPS[1].weights_NHTS[1, 1, 2])
    browser.click("#heat canvas", y=3.5 / rows)
    browser.move("h1")
    assert shown(browser) == numbers(MAPS[1].weights_NHTS[1, 1, 3])
    assert browser.js("location.hash").endswith("token=3")


def test_the_keyboard_alone_reaches_everything(browser, url):
    browser.open(f"{url}#map=1&layer=0&head=0&token=0")
    reached = []
    for _ in range(4):
        browser.press("Tab", 9)
        browser.press("ArrowDown", 40)
        reached.append(browser.js("document.activeElement.name"))
    assert reached == ["map", "layer", "head", "token"]
    # from the last map to the first, and one further for layer, head and token
    assert browser.js("location.hash") == "#map=0&layer=1&head=1&token=1"
    assert shown(browser) == numbers(MAPS[0].weights_NHTS[1, 1, 1])


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_is_not_wider_than_the_window(browser, url, large_url, width):
    for each in (url, large_url):
        browser.open(f"{each}#token=2", width=width)
        root = (
            "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.documentElement)"
        )
        content, window = browser.js(root)
        assert content == window <= width


def test_text_has_enough_contrast_in_light_and_dark_colour_schemes(browser, url):
    backgrounds = []
    for scheme in ("light", "dark"):
        browser.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        browser.open(f"{url}#token=2")
        colours = browser.js(
            "[['background-color', 'section'], ['color', 'body'], ['color', '#keys .weight'], "
            "['color', 'h2']].map("
            "([name, of]) => getComputedStyle(document.querySelector(of)).getPropertyValue(name))"
        )
        panel, *letters = (luminance(colour) for colour in colours)
        backgrounds.append(panel)
        for letter in letters:  # WCAG 2.2, success criterion 1.4.3
            assert (max(panel, letter) + 0.05) / (min(panel, letter) + 0.05) >= 4.5, colours
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert backgrounds[0] > 0.8 and backgrounds[1] < 0.05


def luminance(colour: str) -> float:
    """Returns the relative luminance of `rgb(r, g, b)`, as WCAG 2.2 defines it."""
    channels = np.array(colour.removeprefix("rgb(").removesuffix(")").split(","), float) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_the_page_requests_only_itself_and_logs_no_error(browser, url):
    browser.open(url)
    for selector in (choice("map", 1), choice("layer", 1), choice("head", 0), choice("token", 2)):
        browser.click(selector)
    browser.move("#heat canvas")
    requested = {
        event["params"]["request"]["url"]
        for event in browser.events
        if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
    }
    assert requested == {url}
    problems = (
        "Log.entryAdded",
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
        "Page.javascriptDialogOpening",
    )
    assert [event for event in browser.events if event["method"] in problems] == []


def test_the_browser_reports_requests_and_errors(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<title>x</title><img src='other.png'><script>console.error(1); throw 2</script>"
    )
    browser.open(path.as_uri())
    methods = {event["method"] for event in browser.events}
    assert methods >= {
        "Network.requestWillBeSent",
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
    }
    requested = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    assert requested == [path.as_uri(), (tmp_path / "other.png").as_uri()]


def test_a_page_of_4_layers_8_heads_and_60_tokens_is_smaller_than_3_mb_and_works(
    browser, large_url
):
    assert len(Path(large_url.removeprefix("file://")).read_bytes()) < 3e6
    browser.open(f"{large_url}#map=2&layer=3&head=7&token=59")
    np.testing.assert_allclose(np.array(shown(browser), float), LARGE[3, 7, 59], atol=0.00551)
