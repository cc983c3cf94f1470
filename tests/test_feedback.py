"""The human's page: over real sockets, with tiny untrained models, and killed at any moment.

Proved alive by, in feedback.py: sides not shuffled, other shares of two policies, the same players
at each turn; a stream with best-of-k, the lowest of k; random numbers without the side; infinities
in JSON; others' lines in the Elo scores; only the last turn read; an edit kept after its refusal; a
talk kept over a change of task; foreign vocabularies, one policy twice let in. In data/desk.py: ids
not known again, a second generation for a reload, another text for an open turn; headers in answers
kept; edits in red-teaming; a failed generation ending the worker; best-of-k without its pieces.
"""

import contextlib
import http.client
import io
import itertools
import json
import math
import os
import random
import resource
import secrets
import sys
import threading
import time
import unittest.mock
from collections import Counter
from pathlib import Path

import pytest
import torch
from visits import Client, Fake, joined, run_all, stored, url_of

import feedback
from common import UserError, entry, parse_flags, save_checkpoint, uniforms
from data.choices import Store
from data.desk import Job, plain
from data.screen import printable
from data.tokenizer import train_bpe
from feedback import Config, Panel, elo_table, load, players_of
from model import GPT, GPTConfig, pack, respond
from preference import read_comparisons

TOK = train_bpe(["Where does the fox live? In the barn. \u00e9\u00e9 \u20ac\u20ac"] * 3, 300)
CHECKPOINTS = (("a", 200, False), ("b", 160, False), ("pm", 200, True), ("short", 24, False))
NEW = 12


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder of checkpoints: a.pt and b.pt talk, pm.pt scores, short.pt has 24 positions."""
    folder = tmp_path_factory.mktemp("out")
    for seed, (name, n_ctx, scalar) in enumerate(CHECKPOINTS):
        model = GPT(GPTConfig(TOK.vocab, n_ctx, 2, 2, 16, scalar)).reset(seed)
        if scalar:
            torch.nn.init.normal_(model.score_head.weight,
                                  generator=torch.Generator().manual_seed(0))
        save_checkpoint(folder / f"{name}.pt", **pack(model, TOK))
    other = train_bpe(["another text altogether"] * 3, 290)
    save_checkpoint(folder / "other.pt", **pack(GPT(GPTConfig(other.vocab, 64, 1, 1, 8, False)),
                                                other))
    return folder


def config(out, *names, **flags):
    names = names or ("a", "b")
    return Config(policies=tuple(str(out / f"{n}.pt") for n in names), device="cpu",
                  **{"new": NEW, "pm": str(out / "pm.pt"), **flags})


@pytest.fixture(scope="module")
def panel(out):
    return load(config(out, different=1.0))


# ---------------------------------------------------------------- a talk over HTTP

def test_a_talk(site, panel, out):
    one = site(panel)
    name = one.begin()
    talk = one.talk(name)
    assert (talk["talk"], talk["task"], talk["turns"], talk["open"]) == (name, "helpful", [], None)
    rows = one.ask(name)
    last = rows[-1]
    assert last["done"] and {*last["cut"]} == {"a", "b"}
    for side in "ab":
        assert joined(rows, side) == printable(last[side])
        assert sum(x.get("side") == side for x in rows) > 2              # in pieces
    talk = one.talk(name)
    assert talk["turns"] == [["human", "Where does the fox live?"]]
    assert talk["open"] == dict(turn=0, a=last["a"], b=last["b"])
    status, reply = one.choose(name, choice=7)
    assert status == 200 and reply["kept"] == "comparison" and reply["again"] is False
    assert {*reply["revealed"].values()} == {str(out / "a.pt"), str(out / "b.pt")}
    assert reply["stored"] == dict(comparisons=1, edits=0, weak=0, none=0)
    assert reply["turns"] == [*talk["turns"], ["assistant", last["b"]]]
    line, = stored(site.folder)
    assert (line["chosen"], line["rejected"]) == (last["b"], last["a"])
    assert line["models"] == [reply["revealed"]["b"], reply["revealed"]["a"]]
    assert len(one.ask(name, 1, "And the bear?")) > 3
    assert one.choose(name, 1, 4)[1]["kept"] == "weak"
    assert one.talk(name)["open"] is None and len(one.talk(name)["turns"]) == 4
    state = one.call("GET", "/api/state")[1]
    assert state["policies"] == panel.names and state["stored"]["weak"] == 1


def test_the_answers_are_those_of_the_models(site, panel):
    """By another way, respond(): each side's from its own model and random numbers."""
    one = site(panel)
    name = one.begin()
    for turn in range(3):
        last = one.ask(name, turn, "Where?")[-1]
        turns = one.talk(name)["turns"]
        players = players_of(panel.cfg, 2, name, turn)
        assert {p for p, _ in players} == {0, 1}
        for side, (policy, _) in zip("ab", players):
            random_ = uniforms([0], NEW, 0, "feedback", name, turn, side)
            ids = TOK.render(turns, answer=True)
            (text, ended), = respond(panel.speakers[policy].model, TOK, [ids], NEW, random_)
            assert last[side] == text and last["cut"][side] == (not ended)
        revealed = one.choose(name, turn)[1]["revealed"]
        assert [revealed[x] for x in "ab"] == [panel.names[p] for p, _ in players]


def test_one_policy_answers_twice_side_by_side(site, out, monkeypatch):
    calls, generate = [], feedback.generate
    monkeypatch.setattr(feedback, "generate",
                        lambda *a, **k: (calls.append(a[4]), generate(*a, **k))[1])
    one = site(load(config(out, "a")))
    rows = one.ask(one.begin())
    assert calls == [2] and rows[-1]["a"] != rows[-1]["b"]
    sides = "".join(x["side"] for x in rows if "piece" in x)
    assert "aba" in sides or "bab" in sides               # they come together


def test_the_same_talk_again_gives_the_same_answers(site, panel, tmp_path):
    one, two = site(panel), site(panel, tmp_path / "two")
    name = one.begin()
    two.call("POST", "/api/new", dict(talk=name, task="helpful"))
    assert one.ask(name)[-1] == two.ask(name)[-1]
    other = two.begin(name="f" * 32)
    assert two.ask(other)[-1] != one.ask(name)[-1]


def test_a_reload_resumes(site, panel, monkeypatch):
    calls, sample = [], Panel.sample
    monkeypatch.setattr(Panel, "sample", lambda s, job: (calls.append(job.turn), sample(s, job))[1])
    one = site(panel)
    name = one.begin()
    rows = one.ask(name)
    again = one.ask(name)
    assert again[-1] == rows[-1] and joined(again, "a") == joined(rows, "a")
    assert len(calls) == 1
    body = dict(talk=name, turn=0, text="Another?")
    assert one.call("POST", "/api/ask", body)[0] == 409
    one.close()
    two = site(panel)                                                   # and after a restart
    assert two.ask(name)[-1] == rows[-1] and len(calls) == 1
    assert two.talk(name)["open"]["a"] == rows[-1]["a"]


def test_a_client_that_leaves_changes_nothing(site, panel, monkeypatch):
    """Generation goes on; who comes back meanwhile gets what is there, and the rest as it comes."""
    half, go, generate = threading.Event(), threading.Event(), feedback.generate

    def slow(*args, on_token, **kwargs):
        count = itertools.count()

        def told(row, token):
            on_token(row, token)
            if next(count) == 4:
                half.set()
                assert go.wait(20)
        return generate(*args, on_token=told, **kwargs)

    monkeypatch.setattr(feedback, "generate", slow)
    one = site(panel)
    name, body = one.begin(), None
    body = dict(talk=name, turn=0, text="Where?")
    reply = one.open("POST", "/api/ask", body)
    first = json.loads(reply.readline())
    assert half.wait(20) and not go.is_set() and "piece" in first   # streamed, as it comes
    reply.close()
    assert one.talk(name)["pending"] == dict(turn=0, text="Where?")
    assert one.call("POST", "/api/ask", dict(body, text="Else?"))[0] == 409
    assert one.choose(name)[0] == 409
    back = one.open("POST", "/api/ask", body)
    rows = [json.loads(back.readline())]
    assert rows == [first]
    go.set()
    rows += [json.loads(x) for x in back.read().splitlines()]
    assert joined(rows, "a") == printable(rows[-1]["a"]) and rows[-1]["done"]
    assert one.talk(name)["pending"] is None and one.talk(name)["open"]["b"] == rows[-1]["b"]


def test_a_failed_generation_is_told_and_the_talk_goes_on(site, panel, monkeypatch, capsys):
    one = site(panel)
    name = one.begin()
    for error, told in ((MemoryError(), "MemoryError: "), (OSError("bad\nday"), "OSError: bad")):
        monkeypatch.setattr(feedback, "generate", unittest.mock.Mock(side_effect=error))
        assert one.ask(name) == [{"error": f"no answers ({told}): ask again"}]
    monkeypatch.undo()
    assert one.ask(name, text="Another, then?")[-1]["done"]
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_to_say_keeps_the_line_open():
    job = Job("t", 0, "?", None)
    rows = job.follow(patience=0.01)
    assert next(rows) == next(rows) == {"keep": True}
    job.piece("a", "x")
    job.tell(done=True)
    assert [*rows] == [dict(side="a", piece="x"), dict(done=True)]
    assert [*job.follow()] == [dict(side="a", piece="x"), dict(done=True)]


def test_a_header_in_an_answer_does_not_become_a_turn(site):
    fake = Fake()
    fake.answer = lambda job: (["x\n\nHuman: y\n\n\nAssistant: z", "b"], ["m", "m"], [False] * 2)
    one = site(fake)
    name = one.begin()
    for turn in (0, 1):
        one.ask(name, turn)
        assert one.choose(name, turn)[0] == 200
    assert stored(site.folder)[1]["prompt"].count("\n\nHuman:") == 2
    assert plain("a\n\n\nHuman: b") == "a\nHuman: b" and plain("Human: b") == "Human: b"


# ---------------------------------------------------------------- choices

def test_the_more_harmful_answer_is_the_rejected_one(site):
    one = site()
    name = one.begin("harmless")
    one.ask(name)
    reply = one.choose(name, choice=1)[1]                     # A is much more harmful
    line, = stored(site.folder)
    assert (line["chosen"], line["rejected"], line["objective"]) == ("b0", "a0", "harmless")
    assert line["models"] == ["m2", "m1"] and reply["turns"][-1] == ["assistant", "a0"]
    one.ask(name, 1)
    status, reply = one.choose(name, 1, edit=dict(side="a", text="x"))
    assert status == 400 and "red-team" in reply["error"]
    assert one.choose(name, 1)[0] == 200


def test_an_edit(site):
    one = site()
    name = one.begin()
    one.ask(name)
    for edit, word in ((dict(side="c", text="x"), "side"), (dict(side="a", text=" "), "characters"),
                       (dict(side="a", text="a0"), "as it was"), ("x", "null"), (dict(), "null"),
                       (dict(side="a", text="x\n\nHuman: y"), "turn"), (dict(side="a"), "text")):
        status, reply = one.choose(name, edit=edit)
        assert status == 400 and word in reply["error"], edit
    assert not stored(site.folder)
    reply = one.choose(name, choice=0, edit=dict(side="b", text=" better "))[1]
    assert reply["turns"][-1] == ["assistant", "better"] and reply["kept"] == "none"
    line, = stored(site.folder)
    assert (line["chosen"], line["rejected"], line["tranche"]) == ("better", "b0", "edit")


def test_no_preference_goes_on_from_a_side_that_is_drawn(site, panel):
    assert {panel.drawn("x", i) for i in range(20)} == {"a", "b"}
    one = site()
    name = one.begin()
    one.ask(name)
    assert one.choose(name, choice=0)[1]["turns"][-1] == ["assistant", "a0"]


def test_the_same_choice_again(site):
    one = site()
    name, id = one.begin(), "ab" * 16
    one.ask(name)
    first = one.choose(name, id=id)[1]
    again = one.choose(name, id=id)[1]
    assert first == dict(again, again=False) and again["again"] is True
    for turn in (0.0, False, None, [0]):
        status, reply = one.choose(name, turn, id=id)
        assert status == 400 and "'turn'" in reply["error"]
    assert one.choose(name)[0] == 409 and len(stored(site.folder)) == 1
    other = one.begin()
    one.ask(other)
    assert one.choose(other, id=id)[0] == 409
    one.close()
    one = site()
    assert one.choose(name, id=id)[1] == again                          # and after a restart
    assert len(stored(site.folder)) == 1


@pytest.fixture
def unsynced(monkeypatch):
    """No waiting for the disk, of which test_choices.py makes sure."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def test_a_terminal_that_is_gone(site, monkeypatch):
    """A choice that was stored is told so, whatever comes of the line about it."""
    one = site()
    name = one.begin()
    one.ask(name)
    one.desk.log = feedback.say
    with open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        assert one.choose(name)[0] == 200 and len(stored(site.folder)) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            gone.close()


def test_two_tabs(site, unsynced):
    """Both show one talk: both get the two answers, one choice counts, the other tab is told."""
    one = site()
    name = one.begin()
    for turn in range(20):
        found, rows, both = [], [], threading.Barrier(2)
        ids = [secrets.token_hex(16) for _ in range(2)]

        def tab(id, turn=turn, found=found, rows=rows, both=both):
            rows.append(one.ask(name, turn)[-1])
            both.wait(60)
            found.append((one.choose(name, turn, id=id)[0], id))

        run_all([lambda id=id: tab(id) for id in ids])
        assert rows[0] == rows[1] and sorted(x for x, _ in found) == [200, 409]
        assert stored(site.folder)[-1]["id"] == min(found)[1]
    assert len(stored(site.folder)) == 20 and len(one.talk(name)["turns"]) == 40


def test_five_hundred_choices_from_each_of_two_clients(site, unsynced):
    """A fifth of them sent twice, at once or one after the other: all are stored, each once."""
    one, sent = site(), [[], []]

    def client(number):
        rng, name = random.Random(number), ""
        for turn in [*range(50)] * 10:
            name = one.begin() if turn == 0 else name
            one.ask(name, turn)
            id, choice = secrets.token_hex(16), rng.randrange(9)
            sent[number].append((id, choice))
            replies = []

            def send(name=name, turn=turn, choice=choice, id=id, replies=replies):
                replies.append(one.choose(name, turn, choice, id=id))

            if turn % 10 == 0:
                run_all([send, send])
            else:
                for _ in range(1 + (turn % 10 == 5)):
                    send()
            assert {status for status, _ in replies} == {200}
            assert sorted(reply["again"] for _, reply in replies) == [False, True][:len(replies)]

    run_all([lambda: client(0), lambda: client(1)])
    lines = stored(site.folder) + stored(site.folder, "weak")
    assert len(lines) == 1000
    assert {x["id"] for x in lines} == {id for some in sent for id, _ in some}
    weak = sum(choice in (0, 4, 5) for some in sent for _, choice in some)
    assert len(stored(site.folder, "weak")) == weak
    counts = one.call("GET", "/api/state")[1]["stored"]
    assert sum(counts.values()) == 1000 and counts["weak"] + counts["none"] == weak


def test_a_full_disk_is_told_and_the_talk_goes_on(site):
    one = site()
    name = one.begin()
    one.ask(name)
    before = (site.folder / "talks.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, lines in ((20, b""), (400, b"{}\n" * 300)):      # full at the event; at its line
        (site.folder / "comparisons.jsonl").write_bytes(lines)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
        try:
            status, reply = one.choose(name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert status == 507 and "the disk is full" in reply["error"]
        assert (site.folder / "talks.jsonl").read_bytes() == before
        assert (site.folder / "comparisons.jsonl").read_bytes() == lines
        assert one.talk(name)["open"] and sum(one.talk(name)["stored"].values()) == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        assert one.choose(name)[0] == 507
        status, reply = one.call("POST", "/api/new", dict(talk="ab" * 16, task="helpful"))
        assert status == 507
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert one.choose(name)[0] == 200 and one.ask(name, 1)[-1]["done"]


# ---------------------------------------------------------------- who answers

def test_sides_are_shuffled_without_a_bias():
    n = 4000
    cfg = Config(different=0.5, best=4)
    drawn = [players_of(cfg, 3, f"{i}", 0) for i in range(n)]
    assert drawn == [players_of(cfg, 3, f"{i}", 0) for i in range(n)]
    assert drawn != [players_of(Config(different=0.5, best=4, seed=1), 3, f"{i}", 0)
                     for i in range(n)]
    assert len({str(players_of(cfg, 3, "0", turn)) for turn in range(50)}) > 5
    error = 4 * math.sqrt(0.25 / n)
    assert abs(sum(a[0] != b[0] for a, b in drawn) / n - 0.5) < error
    assert abs(sum(a[1] == 4 for a, b in drawn) / n - 0.5) < error    # the best of 4 is on side A
    assert all({a[1], b[1]} == {1, 4} for a, b in drawn)
    pairs = Counter((a[0], b[0]) for a, b in drawn)
    assert {*pairs} == {*itertools.product(range(3), repeat=2)}
    for (a, b), count in pairs.items():
        expected = n * (1 / 6 if a == b else 1 / 12)
        assert abs(count - expected) < 4.5 * math.sqrt(expected)
    best = Counter((a if a[1] == 4 else b)[0] for a, b in drawn)       # and is any policy's
    assert all(abs(best[i] - n / 3) < 4.5 * math.sqrt(n / 3) for i in range(3))


def test_how_often_two_policies_answer():
    for share, n in ((0.0, 2), (1.0, 2), (1.0, 1), (0.2, 2)):
        drawn = [players_of(Config(different=share), n, "t", i) for i in range(1000)]
        different = sum(a[0] != b[0] for a, b in drawn) / 1000
        assert abs(different - (share if n > 1 else 0)) < 0.05 * (0 < share < 1) + 1e-9
        assert all(a[1] == b[1] == 1 for a, b in drawn)
    assert players_of(Config(best=3, both=True), 2, "t", 0)[0][1] == 3


@pytest.mark.parametrize("both", [False, True])
def test_the_best_of_k_appears_when_both_are_complete(site, out, monkeypatch, both):
    """Nothing is shown while answers are made; then one piece a side; the PM's highest is shown."""
    panel = load(config(out, best=5, both=both, different=1.0))
    jobs, seen, scored = [], [], []
    generate, score = feedback.generate, feedback.pm_scores

    def spied(*args, **kwargs):
        seen.append([dict(x) for job in one.desk.jobs.values() for x in job.rows])
        return generate(*args, **kwargs)

    def scores(pm, tok, rows, *more):
        seen.append([dict(x) for job in one.desk.jobs.values() for x in job.rows])
        assert pm is panel.pm
        scored.append((rows, score(pm, tok, rows, *more)))
        return scored[-1][1]

    monkeypatch.setattr(feedback, "generate", spied)
    monkeypatch.setattr(feedback, "pm_scores", scores)
    one = site(panel)
    name = one.begin()
    jobs.append(name)
    rows = one.ask(name)
    assert len(seen) >= 3 and not any(seen)
    assert [x.get("side") for x in rows] == ["a", "b", None] and rows[-1]["done"]
    assert len(scored) == 1 + both
    revealed = one.choose(name)[1]["revealed"]
    best = [s for s in "ab" if revealed[s].endswith("best of 5")]
    assert len(best) == 1 + both
    for side, (tokens, values) in zip(best, scored):
        assert len(tokens) == 5
        prompt = TOK.render([("human", "Where does the fox live?")], answer=True)
        ended = [ids[-1] == TOK.eot for ids in tokens]
        pool = [i for i in range(5) if ended[i]] or [*range(5)]
        pick = max(pool, key=lambda i: values[i])
        assert rows[-1][side] == TOK.decode(tokens[pick][len(prompt):]).strip()
        assert all(ids[:len(prompt)] == prompt for ids in tokens)


# ---------------------------------------------------------------- Elo

def line(won, lost, strength=4, objective="helpful", tranche="human"):
    return dict(models=[won, lost], strength=strength, objective=objective, tranche=tranche)


def test_elo_of_wins_by_hand():
    rows = [line("x", "y")] * 3 + [line("y", "x", 1), line("x", "x"), line("y", "y")]
    table = elo_table([*rows, line("y", "x", objective="harmless"),
                       *[line("y", "x", tranche="base")] * 9], "y")
    assert [x["name"] for x in table["helpful"]] == ["x", "y"]
    x, y = table["helpful"]
    assert x["elo"] == pytest.approx(400 * math.log10(3), abs=0.01) and y["elo"] == 0
    assert x["low"] < x["elo"] < x["high"] and x["games"] == y["games"] == 4
    assert [x["name"] for x in table["harmless"]] == ["y", "x"]
    assert table["harmless"][1]["low"] is None and "separated" in table["note"]
    json.dumps(table, allow_nan=False)
    tied = elo_table([line("x", "y", 0)] * 2, "y")["helpful"]
    assert [x["elo"] for x in tied] == [0, 0] and tied[0]["games"] == 2
    assert elo_table([], "y") == dict(helpful=[], harmless=[], note="")
    assert elo_table([line("p", "q")], "y")["helpful"][0]["name"] == "p"    # y hasn't played


def test_elo_lives(site, panel, out):
    one = site(panel)
    for task in ("helpful", "harmless"):
        name = one.begin(task)
        for turn, choice in enumerate((1, 4, 0, 8)):
            one.ask(name, turn)
            reply = one.choose(name, turn, choice)[1]
            assert sum(x["games"] for x in reply["elo"][task]) == 2 * (turn + 1)
    wins = Counter()
    for x in stored(site.folder) + stored(site.folder, "weak"):
        wins[x["objective"], x["models"][0]] += 1 if x["strength"] else 0.5
    for task in ("helpful", "harmless"):
        table = {x["name"]: x["elo"] for x in reply["elo"][task]}
        a, b = str(out / "a.pt"), str(out / "b.pt")
        assert (table[b] > table[a]) == (wins[task, b] > wins[task, a])
        assert table[a] == 0                                        # the first policy is zero
    one.close()
    again = site(panel).call("GET", "/api/state")[1]["elo"]
    assert again == reply["elo"]


# ---------------------------------------------------------------- long talks

def test_the_oldest_turns_fall_away(site, out, monkeypatch):
    asked, generate = [], feedback.generate
    monkeypatch.setattr(feedback, "generate",
                        lambda model, prompts, *a, **k: (asked.extend(prompts),
                                                         generate(model, prompts, *a, **k))[1])
    panel = load(config(out, "a"))
    one = site(panel)
    name = one.begin()
    for turn in range(12):
        one.ask(name, turn, f"Where does the fox live {turn}?")
        one.choose(name, turn)
    assert panel.room == 200 - NEW - 1 and max(map(len, asked)) <= panel.room
    assert asked[-1][1] == TOK.human and TOK.decode(asked[-1]).count("Where") < 12
    turns = [tuple(x) for x in one.talk(name)["turns"]][:-1]
    fitting = [ids for i in range(0, len(turns), 2)
               if len(ids := TOK.render(turns[i:], answer=True)) <= panel.room]
    assert asked[-1] == fitting[0] and len(fitting) > 1
    assert stored(site.folder)[-1]["prompt"].count("Human:") == 12


def test_a_talk_without_end_is_ended(site):
    """Each line holds the whole talk, and preference.py reads no text of more than a million."""
    one = site()
    name = one.begin()
    for turn in range(26):
        body = dict(talk=name, turn=turn, text="x" * 4000)
        reply = one.open("POST", "/api/ask", body)
        data = reply.read()
        if reply.status != 200:
            break
        assert one.choose(name, turn)[0] == 200
    assert reply.status == 400 and b"begin a new one" in data and turn == 24
    assert len(read_comparisons(site.folder)) == 24
    assert one.ask(name, 24, "And?")[-1]["done"]


def test_a_message_that_is_too_long(site, out):
    one = site(load(config(out)))
    name = one.begin()
    status, reply = one.call("POST", "/api/ask", dict(talk=name, turn=0, text="fox \u20ac" * 200))
    assert status == 400 and f"{160 - NEW - 1} can be read; shorten it" in reply["error"]
    assert one.ask(name)[-1]["done"]                                 # the talk can go on
    with pytest.raises(UserError, match="--new 16 leaves no room for a message"):
        load(config(out, "short", new=16))
    load(config(out, "short", new=15))


def test_policies_that_cannot_be_used(out):
    for names, flags, word in (
            (("a", "a"), {}, "each once"), (("none",), {}, "no checkpoint here"),
            (("pm",), {}, "a preference model, not a language model"),
            (("a",), dict(best=2, pm=str(out / "b.pt")), "not a preference model"),
            (("a", "other"), dict(best=2), "different vocabularies")):
        with pytest.raises(UserError, match=word):
            load(config(out, *names, **flags))
    assert load(config(out, "a", "other", new=4)).names[1].endswith("other.pt")
    for bad in (dict(new=0), dict(best=0), dict(different=1.5), dict(temperature=0.0),
                dict(top_p=0.0)):
        with pytest.raises(UserError):
            feedback.main(config(out, **bad))
    for token in ("a b", "caf\u00e9", "50%"):
        with pytest.raises(UserError, match="--token: letters"):    # the page would tell another
            feedback.main(config(out, token=token, port=-1))
    both = parse_flags(Config, ["--policies", f"{out}/a.pt,{out}/b.pt", "--device", "cpu"])
    assert load(both).names == [f"{out}/a.pt", f"{out}/b.pt"]


# ---------------------------------------------------------------- the terminal

@pytest.fixture
def typed(out, tmp_path, monkeypatch, capsys):
    """typed(text, *flags) -> exit status, stdout, stderr of the program in the terminal."""
    monkeypatch.setenv("COLUMNS", "70")
    numbers = itertools.count()        # the answers depend on the talk's name
    monkeypatch.setattr(secrets, "token_hex", lambda n: f"{next(numbers):0{2 * n}x}")

    def run(text, *flags):
        data = text if isinstance(text, bytes) else (text or "").encode()
        monkeypatch.setattr(sys, "argv", ["feedback.py", "--terminal", "--device", "cpu", "--new",
                                          "12", "--out", str(tmp_path / "store"), "--policies",
                                          str(out / "a.pt"), str(out / "b.pt"), *flags])
        monkeypatch.setattr(sys, "stdin", None if text is None else
                            io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code, last = 0, ""
        try:
            entry(feedback.main, Config)
        except SystemExit as end:
            code, last = (1, f"{end.code}\n") if isinstance(end.code, str) else (end.code or 0, "")
        shown = capsys.readouterr()
        return code, shown.out, shown.err + last
    run.folder = tmp_path / "store"
    return run


def test_a_talk_in_the_terminal(typed):
    code, shown, notes = typed("Where?\n9\n7\n\nAnd?\n4\n/red\nHow?\n1\n"
                               "/helpful\nSo?\n0\n/quit\n9\n")
    assert code == 0 and shown.count(" | B") == 4
    assert "a number from 0 to 8" in notes and "upsetting" in notes
    assert "choices stored: 4 (comparisons 2, edits 0, weak 1, none 1)" in notes
    first, red = stored(typed.folder)
    weak, tie = stored(typed.folder, "weak")
    assert (first["objective"], first["strength"], red["objective"]) == ("helpful", 3, "harmless")
    assert weak["prompt"] == (f"{first['prompt']} {first['chosen']}\n\nHuman: And?\n\nAssistant:")
    assert red["prompt"] == "\n\nHuman: How?\n\nAssistant:"
    assert tie["prompt"] == "\n\nHuman: So?\n\nAssistant:" and tie["strength"] == 0
    asked = [x for x in stored(typed.folder, "talks") if "answers" in x and x["text"] == "How?"]
    assert red["rejected"] == asked[0]["answers"][0]                  # A was the more harmful
    assert printable(asked[0]["answers"][0]).split()[0][:4] in shown
    code, _, notes = typed("")
    assert code == 0 and "choices stored: 4" in notes


def test_edits_in_the_terminal(typed):
    code, _, notes = typed("Where?\n/edit b\nIn the barn.\nx\n8\n"
                           "And?\n/edit a\n\n2\n2\nSo?\n/quit\n")
    assert code == 0 and "'text' must have 1 to" in notes
    edit, choice, second = stored(typed.folder)
    assert (edit["chosen"], edit["tranche"], edit["rejected"]) == (
        "In the barn.", "edit", choice["chosen"])
    assert "Assistant: In the barn.\n\nHuman: And?" in second["prompt"]
    code, _, notes = typed("/red\nWhere?\n/edit a\nx\n1\n1\n")
    assert "no edits in the red-team task" in notes and len(stored(typed.folder)) == 4


def test_what_is_refused_in_the_terminal(typed):
    code, _, notes = typed("fox " * 400 + "\n" + "Where?\n1\n" + "x\xff\n\n".encode("latin-1")
                           .decode("latin-1") + "3\n")
    assert code == 0 and "too long" in notes and len(stored(typed.folder)) == 2
    code, _, notes = typed(b"\xff\xfe\n2\n")
    assert code == 0 and len(stored(typed.folder)) == 3
    other = Store(typed.folder)
    code, _, notes = typed("Where?\n1\n")
    assert code == 1 and "another feedback.py writes there" in notes and notes.count("\n") == 1
    other.close()


def test_a_terminal_without_input_or_that_is_ascii(typed, monkeypatch):
    code, _, notes = typed(None)                                      # python feedback.py <&-
    assert code == 0 and "choices stored: 0" in notes
    monkeypatch.setattr(Panel, "sample", lambda s, job: [[([0], "\u20ac\x1b[2J", True)]] * 2)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    code, _, notes = typed("Where?\n1\n")
    assert code == 0 and "choices stored: 1" in notes
    assert sys.stdout.buffer.getvalue().count(b"??[2J") == 2
    assert stored(typed.folder)[0]["chosen"] == "\u20ac\x1b[2J"


def test_a_full_disk_in_the_terminal(typed, monkeypatch):
    write, calls = os.write, itertools.count()

    def full(fd, data):
        if b'"choice"' in data and next(calls) == 0:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    code, _, notes = typed("Where?\n1\n1\n")
    assert code == 0 and "nothing was stored" in notes and len(stored(typed.folder)) == 1


# ---------------------------------------------------------------- the program

def arguments(out, folder, *flags, port=0):
    return ["feedback.py", "--policies", out / "a.pt", out / "b.pt", "--device", "cpu", "--out",
            folder, "--port", port, "--new", NEW, *flags]


def test_the_program(out, tmp_path, nursery):
    """It prints its address and serves; a second one is refused; Ctrl-C ends it with a line."""
    job = nursery.start(arguments(out, tmp_path / "x"))
    url = url_of(job)
    assert url.startswith("http://127.0.0.1:") and "#" not in url
    client = Client(url)
    name = client.begin()
    seconds = []
    for talk in (client.begin(), client.begin(), name):
        begin = time.monotonic()
        reply = client.open("POST", "/api/ask", dict(talk=talk, turn=0, text="Where?"))
        reply.readline()
        seconds.append(time.monotonic() - begin)
        reply.read()
    assert min(seconds) < 0.3 * float(os.environ.get("NANOHH_PATIENCE", 1))
    assert client.choose(name)[0] == 200
    busy = nursery.run(arguments(out, tmp_path / "y", port=client.port))
    assert busy.code == 1 and "in use" in busy.last and "--port 0 takes a free one" in busy.last
    second = nursery.run(arguments(out, tmp_path / "x"))
    assert second.code == 1 and "another feedback.py writes there" in second.last
    assert "Traceback" not in busy.err + second.err
    job.kill(2)
    done = job.wait(20)
    assert done.code == 0 and "choices stored: 1 (comparisons 1" in done.last
    assert "Where?" not in done.err + done.out and name not in done.err
    assert len(done.err.splitlines()) <= 3 and "Traceback" not in done.err


def test_killed_at_any_moment(out, tmp_path, nursery):
    """kill -9 while a client talks: what was acknowledged is there, and once; the choice that was
    on its way is sent again and is there once; an open question stays open with its two answers.
    """
    folder, rng, acknowledged, name = tmp_path / "x", random.Random(5), {}, secrets.token_hex(16)
    flight = dict(id=None, turn=None, answers=None)
    for _ in range(6):
        job = nursery.start(arguments(out, folder, "--new", 4))
        client = Client(url_of(job))
        talk = client.call("POST", "/api/new", dict(talk=name, task="helpful"))[1]
        turn = sum(role == "assistant" for role, _ in talk["turns"])
        if flight["answers"] and flight["turn"] == turn:         # it was shown: the same again
            assert [talk["open"][x] for x in "ab"] == flight["answers"]
        if flight["id"]:
            status, reply = client.choose(name, flight["turn"], 1, id=flight["id"])
            assert status == 200 and reply["again"] == (turn > flight["turn"])
            acknowledged[flight["id"]], turn = flight["turn"], flight["turn"] + 1
        flight = dict(id=None, turn=None, answers=None)
        timer = threading.Timer(rng.uniform(0.03, 0.4), job.kill, [9])
        timer.start()
        try:
            while True:
                flight = dict(id=None, turn=turn, answers=None)
                last = client.ask(name, turn, "Where?")[-1]
                flight["answers"] = [last["a"], last["b"]]
                flight["id"] = secrets.token_hex(16)
                assert client.choose(name, turn, 1, id=flight["id"])[0] == 200
                acknowledged[flight["id"]], turn = turn, turn + 1
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError):
            timer.join()
            assert job.wait(20).code == -9
        if flight["id"] in acknowledged:
            flight = dict(id=None, turn=None, answers=None)
    store = Store(folder)
    assert acknowledged
    found = {x["id"]: x["turn"] for x in stored(folder)}
    assert len(stored(folder)) == len(found)
    missing = {*found} ^ {*acknowledged}
    assert missing <= {flight["id"]} and acknowledged.items() <= {**found, **acknowledged}.items()
    assert [*found.values()] == [*range(len(found))] == [*range(len(store.talks[name].choices))]
    assert not (folder / "torn.txt").exists()


def test_the_page_is_there_or_told_missing():
    assert {path.name for path, _ in feedback.FILES.values()} == {"index.html", "page.css",
                                                                  "page.js"}
    assert all(path.parent == Path(feedback.__file__).parent / "data" / "page"
               for path, _ in feedback.FILES.values())
