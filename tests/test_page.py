"""The human's page, driven in a real headless Chromium against the real feedback.py.

The policies are tiny; where a test needs to know what they say, or when, the server has a script
for that message: pieces of text, and gates at which it waits for the test. Files, sockets, talks
and choices are feedback.py's own. Needs chromium, chromedriver and selenium, which `CI=true` makes
a must.

    python tests/test_page.py --pictures out/laptop     # docs/page-light.png and docs/page-dark.png

Proved alive by: the scale turned round, the edit left out, a choice's id that repeats; text or
names as HTML; a message or a choice not remembered over a reload, or not sent again; a form that
isn't locked; pieces shown twice after a lost connection, no end to a silent one, lines cut at a
chunk's end; digits that pick while one types, a red-team task without its yes, its words missing;
409 ignored, a text not given back, tabs that share a talk; no token; the focus not moved, nothing
announced, a label, legend, role or outline missing; grey text in either scheme, small targets, a
page too wide, motion against the person's wish; an interval's end at the wrong place.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tiny import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "data" / "page"
WORDS = ("much", "clearly", "rather", "slightly")
EVIL = ["<img src=x onerror=alert(1)>", "\"><svg onload=alert(2)>", "</p><script>alert(3)</script>"]

# feedback.py with a script: {message: [[side, piece] or "gate" or "fail", ...]} read from a file.
# The file `gate` lets one gate open, the file `drop` has one choice stored and its reply lost.
PLANTED = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv.pop())
import feedback
from data.desk import Desk
answer, choose = feedback.Panel.answer, Desk.choose

def scripted(self, job):
    print("generating", job.text, file=sys.stderr, flush=True)
    script = json.loads((folder / "script.json").read_text())
    if job.text not in script:
        return answer(self, job)
    texts, names = dict(a="", b=""), script.get("names", ["first", "second"])
    for step in script[job.text]:
        if step == "fail":
            raise RuntimeError("out of memory")
        while step == "gate" and not (folder / "gate").exists():
            time.sleep(0.01)
        if step == "gate":
            (folder / "gate").unlink()
        else:
            texts[step[0]] += step[1]
            job.piece(*step)
    return list(texts.values()), names, [False, False]

def dropping(self, fields):
    reply = choose(self, fields)
    if (folder / "drop").exists():
        (folder / "drop").unlink()
        raise ConnectionResetError
    return reply

feedback.Panel.answer, Desk.choose = scripted, dropping
feedback.entry(feedback.main, feedback.Config, feedback.__doc__)
"""


def chrome(width, height):
    """A headless Chromium, or None where there is no chromium, chromedriver or selenium."""
    try:
        from selenium import webdriver
    except ImportError:
        return None
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), "chromedriver"
    if not binary or not shutil.which(driver):
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                 f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which(driver)))


class Page:
    """What a person does and sees."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url

    def js(self, code, *args):
        return self.driver.execute_script(f"return {code}", *args)

    def until(self, code, *args, seconds=20):
        """Waits until a JavaScript expression is true; returns its value."""
        end = time.monotonic() + seconds * PATIENCE
        while not (value := self.js(code, *args)):
            assert time.monotonic() < end, f"never: {code} {args}\n{self.seen()}"
            time.sleep(0.01)
        return value

    def seen(self):
        return self.js("document.body.innerText")

    def text(self, name):
        return self.js("document.getElementById(arguments[0]).textContent", name)

    def shown(self, name):
        return self.js("document.getElementById(arguments[0]).checkVisibility()", name)

    def focus(self):
        """Id of what has the focus, or its value if it is a step of the scale."""
        return self.js("document.activeElement.id || document.activeElement.value")

    def keys(self, *keys):
        from selenium.webdriver import ActionChains
        ActionChains(self.driver).send_keys(*keys).perform()

    def key(self, name, shift=False, times=1):
        """Presses a named key: ENTER, TAB, ARROW_RIGHT, ..."""
        from selenium.webdriver import ActionChains, Keys
        chain = ActionChains(self.driver)
        for _ in range(times):
            chain = chain.key_down(Keys.SHIFT) if shift else chain
            chain = chain.send_keys(getattr(Keys, name))
            chain = chain.key_up(Keys.SHIFT) if shift else chain
        chain.perform()

    def click(self, name):
        self.js("document.getElementById(arguments[0]).click()", name)

    def load(self):
        self.driver.get(self.url)
        self.ready()

    def reload(self):
        self.driver.refresh()

    def ready(self):
        """Waits until a message can be sent."""
        self.until("document.activeElement.id === 'message' && "
                   "!document.getElementById('send').disabled")

    def new(self):
        """Another tab's eyes: nothing remembered."""
        self.driver.get(self.url)
        self.js("sessionStorage.clear()")
        self.load()

    def type(self, text):
        self.keys(text)
        self.key("ENTER")

    def open(self):
        """Waits for both answers and returns them."""
        self.until("document.getElementById('choice').checkVisibility()")
        return self.text("text-a"), self.text("text-b")

    def ask(self, text):
        self.ready()
        self.type(text)
        return self.open()

    def pick(self, step):
        self.keys(str(step))
        self.key("ENTER")
        self.ready()

    def checked(self):
        return self.js("(document.querySelector('#scale :checked') || {}).value")

    def turns(self):
        return self.js("[...document.querySelectorAll('#turns li')].map("
                       "(x) => [x.className, x.querySelector('p').textContent])")

    def talk(self):
        return json.loads(self.js("sessionStorage.getItem('talk')"))

    def emulate(self, width=1100, scheme="light", motion="no-preference"):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", dict(
            width=width, height=800, deviceScaleFactor=1, mobile=width < 500))
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[
            dict(name="prefers-color-scheme", value=scheme),
            dict(name="prefers-reduced-motion", value=motion)]))


class Served:
    """feedback.py as a process that can be killed and started again at the same address."""

    def __init__(self, tiny, folder):
        self.nursery, self.folder, self.out = tiny.nursery, folder, folder / "feedback"
        self.policies = [tiny.whole("base"), tiny.whole("distill")]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        self.script()

    def start(self):
        self.job = self.nursery.start(
            ["-c", PLANTED, "--policies", *self.policies, "--out", self.out, "--new", 8, "--device",
             "cpu", "--different", 1, "--port", self.url.strip("/").split(":")[-1], self.folder])
        end = time.monotonic() + 30 * PATIENCE
        while self.url not in self.said("out"):
            assert time.monotonic() < end, self.said("err")
            time.sleep(0.01)

    def kill(self):
        self.job.kill(signal.SIGKILL)
        self.job.wait()

    def said(self, name):
        path = self.job.folder / name
        return path.read_text() if path.exists() else ""

    def script(self, **messages):
        part = self.folder / "script.part"
        part.write_text(json.dumps(messages))
        part.rename(self.folder / "script.json")

    def gate(self):
        (self.folder / "gate").touch()

    def lines(self, talk):
        """The lines of a talk: [of comparisons.jsonl], [of weak.jsonl]."""
        found = []
        for name in ("comparisons", "weak"):
            path = self.out / f"{name}.jsonl"
            rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
            found.append([x for x in rows if x["talk"] == talk])
        return found


@pytest.fixture(scope="module")
def browser():
    driver = chrome(1100, 800)
    if driver is None:
        message = "chromium, chromedriver or selenium is missing"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server(browser, tiny, tmp_path_factory):
    served = Served(tiny, tmp_path_factory.mktemp("page"))
    served.start()
    yield served
    served.kill()


@pytest.fixture
def page(browser, server):
    """The page in a fresh tab's state; in the end, nothing may have gone wrong unnoticed."""
    made = Page(browser, server.url)
    made.emulate()
    browser.get_log("browser")
    made.new()
    yield made
    browser.get("about:blank")  # or it would go on asking
    strange = [x["message"] for x in browser.get_log("browser") if x["source"] != "network"]
    assert not strange


# ---------------------------------------------------------------- the sources

def test_sources_hold_nothing_that_reads_text_as_html_and_nothing_from_elsewhere():
    for name, most in (("index.html", 120), ("page.css", 220), ("page.js", 320)):
        text = (PAGE / name).read_text()
        assert text.count("\n") < most, name
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                     "createContextualFragment", "DOMParser", "setHTML", "srcdoc", "Function(",
                     "javascript:", "://", "url(", "@import", "style=", ".style", "localStorage"):
            assert word not in text, f"{name}: {word}"
        assert not re.search(r"\bon[a-z]+\s*=", text), name
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""] and "<style" not in html
    assert set(re.findall(r'(?:src|href)="([^"]*)"', html)) == {"page.js", "page.css", "data:,"}


# ---------------------------------------------------------------- a dialogue, keys only

def test_a_dialogue_by_keys_alone(page, server):
    """Two turns of different strength, an edit, then the red-team task behind its warning."""
    assert page.text("status") == "" and not page.shown("question")
    a, b = page.ask("What color is the fox? 1 2 3")
    assert page.focus() == "scale" and page.checked() is None
    assert page.text("status") == "Both answers are complete. Which is better?"
    assert page.js("document.getElementById('status').getAttribute('aria-live')") == "polite"
    page.keys("2")
    assert (page.checked(), page.focus()) == ("2", "2")
    assert page.js("document.getElementById('card-a').matches("
                   "'#question:has(.a :checked) #card-a')")
    assert server.lines(page.talk()) == [[], []]  # a digit alone stores nothing
    page.key("ENTER")
    page.ready()
    talk = page.talk()
    (line,), weak = server.lines(talk)
    assert (line["chosen"], line["rejected"], line["strength"]) == (a, b, 3) and not weak
    assert line["prompt"].endswith("Human: What color is the fox? 1 2 3\n\nAssistant:")
    assert page.text("status") == (f"Answer A came from {line['models'][0]}, answer B from "
                                   f"{line['models'][1]}. Stored for training.")
    assert page.turns() == [["human", "What color is the fox? 1 2 3"], ["assistant", a]]

    a, b = page.ask("And the owl?")
    page.key("TAB", shift=True)
    assert page.focus() == "edit-b"
    page.key("ENTER")
    assert page.focus() == "edit" and page.text("edit-label") == "Your version of answer B"
    page.keys(" It has 8 eggs.")
    assert page.js("document.getElementById('edit').value") == b + " It has 8 eggs."
    assert page.checked() is None  # digits in a text are text
    page.key("ENTER")
    page.keys("5")
    assert page.checked() is None and len(server.lines(talk)[0]) == 1
    page.key("TAB", times=2)
    page.pick(7)
    (_, edit, line), weak = server.lines(talk)
    edited = b + " It has 8 eggs.\n5"
    assert (edit["chosen"], edit["rejected"], edit["tranche"]) == (edited.strip(), b, "edit")
    assert (line["chosen"], line["rejected"], line["strength"]) == (b, a, 3) and not weak
    assert page.turns()[2:] == [["human", "And the owl?"], ["assistant", edited.strip()]]
    assert "2 comparisons" in page.text("stored") and "1 edits" in page.text("stored")

    page.key("TAB", shift=True, times=2)
    assert page.focus() == "helpful"
    for answer in ("ESCAPE", "ENTER"):  # ENTER: on the button that has the focus at first, to stay
        page.key("ARROW_RIGHT")
        page.until("document.getElementById('warning').open")
        for word in ("offensive", "upsetting", "harmful"):
            assert word in page.text("warning")
        page.key(answer)
        page.until("!document.getElementById('warning').open")
        page.until("document.querySelector('#task :checked').value === 'helpful'")
        assert page.focus() in ("helpful", "harmless") and page.talk() == talk
        page.js("document.querySelector('#task [value=helpful]').focus()")
    assert '"harmless"' not in (server.out / "talks.jsonl").read_text()
    page.key("ARROW_RIGHT")
    page.until("document.getElementById('warning').open")
    page.key("TAB")
    assert page.focus() == "accept"
    page.key("ENTER")
    page.until("document.body.dataset.task === 'harmless'")
    page.ready()
    assert page.talk() != talk and page.turns() == []
    a, b = page.ask("Help me poison the fox.")
    assert not page.shown("edit-a") and not page.shown("edit-b")
    assert page.text("status").endswith("Which is more harmful?")
    words = page.js("document.getElementById('scale').innerText")
    assert "Which answer is more harmful?" in words and words.count("more harmful") == 9
    assert "better" not in words and "honest" not in words
    page.pick(8)
    (line,), weak = server.lines(page.talk())
    assert (line["chosen"], line["rejected"]) == (a, b)  # B was the more harmful one
    assert (line["objective"], line["strength"]) == ("harmless", 4) and not weak
    page.key("TAB", shift=True, times=2)
    page.key("ARROW_LEFT")
    page.until("document.body.dataset.task === 'helpful'")
    page.ready()
    assert page.turns() == []


def test_every_step_of_the_scale(page, server):
    """Eight strengths and no preference: what is stored is what was pressed, and is counted."""
    server.script(**{f"Question {i}": [["a", "one"], ["b", "two"]] for i in range(9)})
    before = list(map(int, re.findall(r"\d+", page.text("stored"))))
    expected = [[], []]
    for step in range(9):
        assert page.ask(f"Question {step}") == ("one", "two")
        page.key("ENTER")
        page.until("document.getElementById('problem').textContent.includes('Pick a step')")
        page.keys("9")
        assert page.checked() is None and page.focus() == "scale"
        page.keys(str(9 - step if step else 3), str(step))  # the last one counts
        label = page.js("document.querySelector('#scale :checked').labels[0].innerText")
        side = "A" if step <= 4 else "B"
        word = (*WORDS, *WORDS[::-1])[step - 1]
        assert label.split() == (f"{step} {side} is {word} better" if step else "0 No preference"
                                 ).split()
        page.key("ENTER")
        page.ready()
        assert page.text("problem") == ""
        kind = "comparison" if step not in (0, 4, 5) else "weak" if step else "none"
        told = dict(comparison="for training", weak="too weak", none="undecided")[kind]
        assert told in page.text("status")
        picked = ["one", "two"] if step <= 4 else ["two", "one"]
        strength = 0 if not step else 5 - step if step <= 4 else step - 4
        expected[kind != "comparison"].append((step, *picked, strength))
    found = server.lines(page.talk())
    assert [[(x["turn"], x["chosen"], x["rejected"], x["strength"]) for x in part]
            for part in found] == expected
    after = list(map(int, re.findall(r"\d+", page.text("stored"))))
    assert [y - x for x, y in zip(before, after)] == [6, 0, 2, 1]
    assert len(page.turns()) == 18
    page.click("restart")
    page.until("!document.querySelector('#turns li')")
    assert page.turns() == []


# ---------------------------------------------------------------- text is text

def test_what_looks_like_html_is_shown_as_it_is(page, server):
    """In a message, in both answers (one cut in its middle), an edit, the names, the table."""
    half = len(EVIL[0]) // 2
    server.script(names=EVIL[:2], **{EVIL[2]: [
        ["a", EVIL[0][:half]], ["b", EVIL[1]], "gate", ["a", EVIL[0][half:]]]})
    page.ready()
    page.type(EVIL[2])
    page.until("document.getElementById('text-a').textContent === arguments[0]", EVIL[0][:half])
    server.gate()
    assert page.open() == (EVIL[0], EVIL[1])
    page.click("edit-b")
    assert page.js("document.getElementById('edit').value") == EVIL[1]
    page.keys(EVIL[2])
    page.js("document.getElementById('scale').focus()")
    page.pick(8)
    assert page.turns() == [["human", EVIL[2]], ["assistant", EVIL[1] + EVIL[2]]]
    assert EVIL[0] in page.text("status") and EVIL[1] in page.text("status")
    names = page.js("[...document.querySelectorAll('tbody th')].map((x) => x.textContent.trim())")
    assert set(EVIL[:2]) <= set(names)
    assert page.js("document.querySelectorAll('img, [onload], [onerror], body script').length") == 0
    page.reload()
    page.ready()
    assert page.js("document.querySelectorAll('img, [onload], [onerror], body script').length") == 0
    assert page.turns() == [["human", EVIL[2]], ["assistant", EVIL[1] + EVIL[2]]]


def test_blanks_lines_and_other_scripts_are_kept(page, server):
    text = "  1. one\n\n  2. two — 狐狸 🦊 \u202eright"
    server.script(Hi=[["a", text], ["b", "&lt;b&gt; &amp;"]])
    assert page.ask("Hi") == (text, "&lt;b&gt; &amp;")
    assert page.js("getComputedStyle(document.getElementById('text-a')).whiteSpaceCollapse"
                   ) == "preserve"
    page.pick(1)
    assert server.lines(page.talk())[0][0]["chosen"] == text


def test_a_stream_that_is_cut_anywhere(page, server):
    """Each byte by itself: lines and characters come together again."""
    server.script(Hi=[["a", "狐狸 "], ["b", "🦊"], ["a", "é"]])
    page.js("(() => { const inner = fetch; window.fetch = async (path, options) => {"
            "const reply = await inner(path, options); if (path !== '/api/ask') return reply;"
            "const bytes = new Uint8Array(await reply.arrayBuffer());"
            "return new Response(new ReadableStream({ start(c) { "
            "for (const x of bytes) c.enqueue(new Uint8Array([x])); c.close(); } })); }; })()")
    assert page.ask("Hi") == ("狐狸 é", "🦊")
    page.pick(1)


# ---------------------------------------------------------------- reloads

def test_reloads_at_every_moment(page, server):
    """A message not sent, an answer half there, an open question, an edit not confirmed."""
    server.script(Slow=[["a", "Sure, "], ["b", "No"], "gate", ["a", "done."], ["b", "."]])
    page.keys("A draft")
    page.key("ENTER", shift=True)
    page.keys("12")
    page.reload()
    page.until("document.getElementById('message').value === 'A draft\\n12'")
    page.ready()
    page.js("document.getElementById('message').select()")
    page.type("Slow")
    for _ in range(3):
        page.until("document.getElementById('text-a').textContent === 'Sure, '")
        assert page.turns() == [["human", "Slow"]] and not page.shown("choice")
        assert page.js("document.getElementById('pair').ariaBusy") == "true"
        assert page.js("document.getElementById('message').value") == ""
        page.reload()
    server.gate()
    assert page.open() == ("Sure, done.", "No.")
    assert page.js("document.getElementById('pair').ariaBusy") == "false"
    page.reload()
    assert page.open() == ("Sure, done.", "No.") and page.turns() == [["human", "Slow"]]
    page.until("document.activeElement.id === 'scale'")
    page.click("edit-a")
    page.keys(" Well")
    page.reload()
    page.open()
    assert page.js("document.getElementById('edit').value") == "Sure, done. Well"
    assert page.text("edit-label") == "Your version of answer A"
    page.click("edit-b")  # one answer is edited, and an edit without a change is none
    assert page.js("document.getElementById('edit').value") == "No."
    page.js("document.getElementById('scale').focus()")
    page.pick(6)
    (line,), _ = server.lines(page.talk())
    assert (line["chosen"], line["strength"]) == ("No.", 2)
    assert page.turns() == [["human", "Slow"], ["assistant", "No."]]
    assert server.said("err").count("generating Slow") == 1
    page.reload()
    page.ready()
    assert page.turns() == [["human", "Slow"], ["assistant", "No."]]
    assert "comparisons stored" in page.text("stored")


def test_a_reload_while_a_message_or_a_choice_is_on_its_way(page, server):
    """It is sent again, the choice under its id: stored once, and the names are told."""
    server.script(Hi=[["a", "one"], ["b", "two"]])
    server.kill()
    page.type("Hi")
    page.until("document.getElementById('problem').textContent.includes('No connection')")
    server.start()
    page.driver.get("about:blank")
    page.driver.get(page.url)
    assert page.open() == ("one", "two") and page.turns() == [["human", "Hi"]]
    server.kill()
    page.keys("3")
    page.key("ENTER")
    page.until("document.getElementById('problem').textContent.includes('No connection')")
    held = page.js("sessionStorage.getItem('choosing')")
    server.start()
    page.driver.get("about:blank")
    page.driver.get(page.url)
    page.until("document.getElementById('status').textContent.includes('came from first')")
    assert page.turns() == [["human", "Hi"], ["assistant", "one"]]
    (line,), _ = server.lines(page.talk())
    assert line["id"] == json.loads(held)["id"] and line["strength"] == 2


# ---------------------------------------------------------------- a server that goes away

def test_a_server_killed_in_the_middle_of_an_answer_and_of_a_choice(page, server):
    server.script(Slow=[["a", "half"], ["b", "ha"], "gate", ["a", " whole"], "gate"])
    page.ready()
    page.type("Slow")
    page.until("document.getElementById('text-a').textContent === 'half'")
    server.kill()
    page.until("document.getElementById('problem').textContent.includes('No connection')")
    assert page.js("document.getElementById('problem').getAttribute('role')") == "alert"
    server.start()
    page.until("document.getElementById('problem').textContent === ''")
    server.gate()
    page.until("document.getElementById('text-a').textContent === 'half whole'")  # half once
    server.gate()
    assert page.open() == ("half whole", "ha") and page.text("problem") == ""
    server.kill()
    page.keys("3")
    page.key("ENTER")
    page.until("document.getElementById('problem').textContent.includes('No connection')")
    page.keys("8")
    page.key("ENTER")  # locked: one choice is on its way
    assert page.checked() == "3"
    server.start()
    page.ready()
    assert page.text("problem") == ""
    (line,), weak = server.lines(page.talk())
    assert (line["chosen"], line["strength"]) == ("half whole", 2) and not weak


def test_a_reply_that_was_lost_stores_nothing_twice(page, server):
    server.script(Hi=[["a", "one"], ["b", "two"]])
    page.ask("Hi")
    (server.folder / "drop").touch()
    page.pick(8)
    assert not (server.folder / "drop").exists()
    (line,), weak = server.lines(page.talk())
    assert (line["chosen"], line["strength"]) == ("two", 4) and not weak
    assert page.turns() == [["human", "Hi"], ["assistant", "two"]]


def test_a_refusal_is_shown_and_nothing_typed_is_lost(page, server):
    server.script(Fail=["fail"], Hi=[["a", "one"], ["b", "two"]])
    for text, reason in (("Fail", "out of memory"), ("fox " * 400, "too long"),
                         ("x" * 4001, "1 to 4000 characters"), ("x" * 70_000, "send less")):
        page.ready()
        page.js("(document.getElementById('message').value = arguments[0]) && 0", text[:-1])
        page.type(text[-1])
        page.until("document.getElementById('problem').textContent.includes(arguments[0])", reason)
        page.ready()
        assert page.js("document.getElementById('message').value") == text.strip()
        assert page.turns() == [] and not page.shown("question")
        page.js("document.getElementById('message').select()")
    assert page.ask("Hi") == ("one", "two") and page.text("problem") == ""
    page.click("edit-a")
    page.keys("\ue003" * 3 + " ")  # backspaces: what is left is blank, and no edit
    page.js("document.getElementById('scale').focus()")
    page.pick(1)
    assert len(server.lines(page.talk())[0]) == 1


def test_a_connection_that_has_gone_silent(page, server):
    """No reply, and a stream without a line: asked again after a while, here a moment."""
    server.script(Hi=[["a", "one"], ["b", "two"]])
    page.ready()
    page.js("(() => { const late = setTimeout, limit = AbortSignal.timeout, inner = fetch;"
            "window.setTimeout = (f, ms, ...rest) => late(f, ms / 100, ...rest);"
            "AbortSignal.timeout = (ms) => limit.call(AbortSignal, ms / 100);"
            "window.seen = []; window.fetch = (path, options) => { window.seen.push(path);"
            "if (window.seen.filter((x) => x === path).length > 1) return inner(path, options);"
            "return path === '/api/ask' ? Promise.resolve(new Response(new ReadableStream({}))) :"
            "new Promise((_, no) => options.signal.addEventListener('abort', () => "
            "no(options.signal.reason))); }; })()")
    assert page.ask("Hi") == ("one", "two")
    page.pick(1)
    assert page.js("window.seen") == ["/api/ask"] * 2 + ["/api/choose"] * 2
    assert len(server.lines(page.talk())[0]) == 1


def test_a_server_that_forgot_the_talk(page, server):
    """The page begins it anew and gives the message back; it can be sent again."""
    server.script(Hi=[["a", "one"], ["b", "two"]])
    page.ask("Hi")
    page.pick(1)
    page.keys("Hi")
    server.kill()
    (server.out / "talks.jsonl").rename(server.folder / "talks.jsonl")
    server.start()
    page.key("ENTER")
    page.until("document.getElementById('problem').textContent.includes('no such talk')")
    page.until("!document.querySelector('#turns li')")
    page.ready()
    assert page.js("document.getElementById('message').value") == "Hi"
    page.key("ENTER")
    assert page.open() == ("one", "two")


# ---------------------------------------------------------------- two tabs

@contextlib.contextmanager
def second_tab(page, talk=None):
    """A second tab, of a talk if one is given, as duplicating the first would make it."""
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.emulate()
    page.load()
    if talk:
        page.js("sessionStorage.setItem('talk', arguments[0])", json.dumps(talk))
        page.reload()
    second = page.driver.current_window_handle
    yield lambda n: page.driver.switch_to.window((first, second)[n])
    page.driver.switch_to.window(second)
    page.driver.close()
    page.driver.switch_to.window(first)


def test_two_tabs_have_two_talks(page, server):
    server.script(Hi=[["a", "one"], ["b", "two"]], Ho=[["a", "three"], ["b", "four"]])
    page.ask("Hi")
    with second_tab(page) as turn_to:
        assert page.turns() == []
        page.ask("Ho")
        page.pick(8)
        second = page.talk()
        turn_to(0)
        assert page.talk() != second and page.turns() == [["human", "Hi"]]
        page.pick(1)
        for talk, chosen in ((second, "four"), (page.talk(), "one")):
            (line,), _ = server.lines(talk)
            assert line["chosen"] == chosen


def test_one_talk_in_two_tabs(page, server):
    """The first to choose, or to ask, is right; the other tab says so and follows."""
    server.script(Hi=[["a", "one"], ["b", "two"]],
                  Both=[["a", "x"], ["b", "y"], "gate", ["b", "z"]])
    page.ask("Hi")
    with second_tab(page, page.talk()) as turn_to:
        assert page.open() == ("one", "two")
        page.pick(1)
        turn_to(0)
        page.pick(8)
        assert "the talk is at turn 1" in page.text("problem")
        (line,), weak = server.lines(page.talk())
        assert line["chosen"] == "one" and not weak
        assert page.turns() == [["human", "Hi"], ["assistant", "one"]]
        page.type("Both")
        page.until("document.getElementById('text-a').textContent === 'x'")
        turn_to(1)
        page.type("Another")
        page.until("document.getElementById('problem').textContent.includes('another message')")
        page.until("document.getElementById('text-a').textContent === 'x'")
        assert page.js("document.getElementById('message').value") == "Another"
        page.js("sessionStorage.setItem('asking', JSON.stringify(arguments[0]))",
                dict(talk=page.talk(), turn=1, text="A third"))  # on its way at a reload
        page.reload()
        page.until("document.getElementById('text-a').textContent === 'x'")
        server.gate()
        assert page.open() == ("x", "yz") and page.turns()[-1] == ["human", "Both"]
        page.js("document.getElementById('scale').focus()")
        page.pick(5)
        assert page.js("document.getElementById('message').value") == "A third"
        turn_to(0)
        assert page.open() == ("x", "yz")
        assert server.said("err").count("generating Both") == 1


# ---------------------------------------------------------------- for everybody

CONTRAST = """(() => {
  const channel = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const rgba = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((s, w, i) => s + w * channel(c[i] / 255), 0);
  const behind = (x) => { for (; x; x = x.parentElement) {
    const c = rgba(getComputedStyle(x).backgroundColor); if (c[3] === 1) return c; } };
  const text = (x) => [...x.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll('body *')].filter((x) => x.checkVisibility() &&
    (text(x) || x.matches('textarea'))).map((x) => {
    const [a, b] = [rgba(getComputedStyle(x).color), behind(x)].map(light).sort((p, q) => q - p);
    return [x.tagName + '#' + x.id + '.' + x.className, (a + 0.05) / (b + 0.05)]; });
})()"""
SMALL = """[...document.querySelectorAll('button, label:has(input), textarea')].filter((x) =>
  x.checkVisibility()).filter((x) => { const r = x.getBoundingClientRect();
  return r.height < 44 || r.width < 44; }).map((x) => x.outerText)"""


def states(page, server):
    """The page empty, with a warning, writing, with a choice made and an editor, and after it."""
    long = "A_word_without_an_end_" * 12
    server.script(names=["out/" + "very_" * 12 + "long", "out/b"],
                  Long=[["a", long], ["b", "two words"], "gate"])
    page.new()
    yield "empty"
    page.js("document.querySelector('#task [value=harmless]').click()")
    page.until("document.getElementById('warning').open")
    yield "warning"
    page.key("ESCAPE")
    page.until("!document.getElementById('warning').open")
    page.click("restart")
    page.ready()
    page.type("Long")
    page.until("document.getElementById('text-b').textContent === 'two words'")
    yield "writing"
    server.gate()
    page.open()
    page.click("edit-a")
    page.js("document.getElementById('scale').focus()")
    for step in ("2", "7", "0"):
        page.keys(step)
        yield "open"
    page.keys("1")
    page.key("ENTER")
    page.ready()
    page.js("document.getElementById('problem').append('Something is wrong.')")
    yield "chosen"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_width_and_targets(page, server, scheme):
    """4.5 to 1 for all text, no scrolling to the side at 360 px, 44 px for a finger."""
    backgrounds = set()
    for width in (360, 1100):
        page.emulate(width, scheme)
        for state in states(page, server):
            low = [(name, ratio) for name, ratio in page.js(CONTRAST) if ratio < 4.5]
            assert not low, (scheme, state, low)
            wide = page.js("document.documentElement.scrollWidth")
            assert wide <= width, (state, wide)
            assert not page.js(SMALL), (state, width)
            backgrounds.add(page.js("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 1
    assert page.js("getComputedStyle(document.documentElement).colorScheme") == "light dark"
    dark = sum(map(int, re.findall(r"\d+", backgrounds.pop()))) < 3 * 128
    assert dark == (scheme == "dark")


def test_answers_are_side_by_side_or_stacked(page, server):
    server.script(Hi=[["a", "one"], ["b", "two"]])
    page.ask("Hi")
    for width, beside in ((1100, True), (360, False)):
        page.emulate(width)
        a, b = (page.js(f"document.getElementById('card-{x}').getBoundingClientRect().toJSON()")
                for x in "ab")
        assert (a["top"] == b["top"], a["right"] < b["left"]) == (beside, beside)
        assert (a["left"] == b["left"], a["bottom"] < b["top"]) == (not beside, not beside)


def test_names_roles_focus_and_motion(page, server):
    """What a screen reader finds, a visible focus, and no motion for who wants none."""
    for state in states(page, server):
        for element in page.driver.find_elements("css selector", "input, textarea, button"):
            if element.is_displayed() or element.get_attribute("name") == "choice":
                visible = element.is_displayed() and state != "warning"
                assert not visible or element.accessible_name, element.get_attribute("outerHTML")
        outline = page.js("((x) => getComputedStyle(x.name === 'choice' ? x.labels[0] : x)"
                          ".outlineStyle)(document.activeElement)")
        assert outline == "solid", (state, page.focus())
        if state == "writing":
            moving = "getComputedStyle(document.getElementById('text-a'), '::after').animationName"
            assert page.js(moving) == "blink"
            page.emulate(motion="reduce")
            assert page.js(moving) == "none"
            page.emulate()
        if state == "open":
            steps = page.driver.find_elements("css selector", "#scale input[type=radio]")
            assert [x.accessible_name.split()[0] for x in steps] == [*"123456780"]
            scale = page.driver.find_element("id", "scale")
            assert scale.accessible_name == "Which answer is more helpful and honest?"
            assert scale.aria_role == "group"
    for kind in ("main", "header", "aside", "h1", "main h2", "main h3", "table caption",
                 "th[scope=row]", "[role=alert]", "[role=status]", "html[lang=en]"):
        assert page.js("document.querySelectorAll(arguments[0]).length", kind), kind
    levels = page.js("[...document.querySelectorAll('h1, h2, h3')].map((x) => x.tagName)")
    assert levels[0] == "H1" and levels.count("H1") == 1


def test_elo_and_bars(page, server):
    """The table is what the server says; a bar without a bound reaches the edge of its picture."""
    server.script(names=["fresh/x", "fresh/y"], Hi=[["a", "one"], ["b", "two"]])
    page.ask("Hi")
    page.pick(1)
    told = page.driver.execute_async_script(
        "fetch('api/state').then((x) => x.json()).then(arguments[0])")
    assert page.text("elo-note") == told["elo"]["note"]
    rows = page.js("[...document.querySelectorAll('#elo table')].map((t) => [...t.tBodies[0].rows]"
                   ".map((r) => [...r.cells].map((c) => c.textContent.trim())))")
    assert [[r[0] for r in table] for table in rows] == [
        [x["name"] for x in told["elo"][task]] for task in ("helpful", "harmless")]
    ends = page.js("[...document.querySelectorAll('#elo line')].map((x) => [x.getAttribute('x1'), "
                   "x.getAttribute('x2')])")
    known = [x for task in ("helpful", "harmless") for x in told["elo"][task]]
    shown = sum(rows, [])
    for row, cells, (start, end) in zip(known, shown, ends, strict=True):
        assert cells[3] == str(row["games"])
        assert (start == "0%", end == "100%") == (row["low"] is None, row["high"] is None)
        if row["elo"] is None:
            assert cells[1] == "?"
        else:
            assert int(cells[1].replace("−", "-")) == pytest.approx(row["elo"], abs=0.51)
        assert ("∞" in cells[2]) == (None in (row["low"], row["high"]))


def test_the_token_goes_with_every_request(page, server):
    """From the address, also after a reload without it."""
    page.driver.get("about:blank")
    page.driver.get(page.url + "#token=abc-DEF_1")
    page.ready()
    page.driver.get("about:blank")
    page.driver.get(page.url)
    page.ready()
    page.js("(() => { const inner = fetch; window.seen = []; window.fetch = (path, options) => {"
            "window.seen.push(options.headers['X-Token']); return inner(path, options); }; })()")
    page.click("restart")
    page.until("window.seen.length")
    page.ask("Hi")
    page.pick(2)
    assert page.js("window.seen") == ["abc-DEF_1"] * 3


# ---------------------------------------------------------------- pictures for the README

def step_of(message, a, b):
    """What a person who knows the toy world's gold utility would press."""
    from data import world
    request = world.request_of([("human", message)])
    more = world.gold(request, b)[0] - world.gold(request, a)[0]
    return 0 if more == 0 else 4 - min(3, int(-2 * more)) if more < 0 else 5 + min(3, int(2 * more))


def pictures(run):
    """docs/page-light.png and docs/page-dark.png: distill and ppo of a run, a few choices made."""
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "out").mkdir()
        (Path(folder) / "out" / "laptop").symlink_to(Path(run).resolve())  # the names on the page
        server = subprocess.Popen(
            [sys.executable, ROOT / "feedback.py", "--out", "choices", "--port", "0", "--different",
             "1"], cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            with chrome(1100, 800) as driver:
                photograph(Page(driver, server.stdout.readline().split()[-1]))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def photograph(page):
    from data import world
    page.emulate()
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(  # the same each time
        source="let n = 0; crypto.getRandomValues = (bytes) => bytes.fill(n += 1)"))
    page.new()
    for animal in world.TRAIN[:8]:
        for message in (f"Tell me about the {animal}.", f"What does the {animal} eat?"):
            page.pick(step_of(message, *page.ask(message)))
        page.click("restart")
        page.until("!document.querySelector('#turns li')")
    message = "What color is the fox?"
    page.pick(step_of(message, *page.ask(message)))
    page.ask("Tell me about the owl.")
    page.keys(str(step_of("Tell me about the owl.", *page.open())))
    for scheme in ("light", "dark"):
        page.emulate(scheme=scheme)
        height = page.js("document.documentElement.scrollHeight")
        taken = page.driver.execute_cdp_cmd("Page.captureScreenshot", dict(
            captureBeyondViewport=True, clip=dict(x=0, y=0, width=1100, height=height, scale=1)))
        path = ROOT / "docs" / f"page-{scheme}.png"
        path.write_bytes(base64.b64decode(taken["data"]))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--pictures":
        sys.exit("usage: python tests/test_page.py --pictures RUN")
    pictures(sys.argv[2])
