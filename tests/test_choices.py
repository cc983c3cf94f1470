"""A person's choices on disk: the lines, and that none is lost or doubled whatever happens.

Proved alive by, in data/choices.py: red-team lines not turned round, helpful ones turned round; the
scale turned on side B; weak choices among the strong; a prompt without its turns; the talk going on
from the edit of the other side; short writes let pass; no fsync; torn lines left, or not kept; only
the first file taken back; lines written twice or not at all after a kill; lines written again into
a file that was moved away; no lock; the event after its lines; ids read from the journal alone.
"""

import json
import os
import random
import resource
import threading

import pytest

from data import choices
from data.choices import Store, kept, lines_of, meaning
from preference import read_comparisons

TALK, OTHER = "0" * 32, "1" * 32


def question(turn=0, text="What?", answers=("left", "right"), models=("m1", "m2")):
    return turn, text, [*answers], [*models], [False, True]


def opened(store, task="helpful", name=TALK, turn=0, **more):
    store.begin(name, task)
    store.ask(name, *question(turn, **more))
    return store


def chosen(store, choice=1, edit=None, goes_on=None, name=TALK, turn=0, id=None):
    side = goes_on or meaning(choice)[0]
    store.choose(name, turn, id or f"{turn:032x}", choice, edit, side)
    return store


def lines(folder, kind="comparisons"):
    return [json.loads(x) for x in (folder / f"{kind}.jsonl").read_text().splitlines()]


def everything(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.jsonl")}


# ---------------------------------------------------------------- a choice as lines

def test_the_scale():
    assert [meaning(c) for c in range(1, 9)] == [
        ("a", 4), ("a", 3), ("a", 2), ("a", 1), ("b", 1), ("b", 2), ("b", 3), ("b", 4)]
    assert meaning(0)[1] == 0
    assert [kept(s) for s in range(5)] == ["none", "weak", *["comparison"] * 3]


@pytest.mark.parametrize("task", ["helpful", "harmless"])
@pytest.mark.parametrize("choice", range(9))
def test_the_line_of_each_choice(tmp_path, task, choice):
    store = chosen(opened(Store(tmp_path), task), choice)
    picked = "left" if choice <= 4 else "right"
    better = picked if task == "helpful" else {"left": "right", "right": "left"}[picked]
    strong = choice in (1, 2, 3, 6, 7, 8)
    line, = lines(tmp_path, "comparisons" if strong else "weak")
    assert not lines(tmp_path, "weak" if strong else "comparisons")
    if choice:
        assert line["chosen"] == better and line["models"][0] == dict(left="m1", right="m2")[better]
    assert {line["chosen"], line["rejected"]} == {"left", "right"}
    assert {*line["models"]} == {"m1", "m2"}
    assert line["strength"] == {0: 0, 1: 4, 2: 3, 3: 2, 4: 1, 5: 1, 6: 2, 7: 3, 8: 4}[choice]
    assert line["prompt"] == "\n\nHuman: What?\n\nAssistant:"
    assert line["objective"] == task and line["tranche"] == "human"
    assert line["annotator"] == "person" and line["id"] == "0" * 32 and "gold" not in line
    # the talk goes on from the picked answer: in red-teaming from the more harmful one
    assert store.talks[TALK].turns()[-1] == ("assistant", picked)
    name = "none" if choice == 0 else "comparisons" if strong else "weak"
    assert store.counts() == dict(dict(comparisons=0, edits=0, weak=0, none=0), **{name: 1})


def test_an_edit_is_a_second_line_and_the_talk_goes_on_from_it(tmp_path):
    store = chosen(opened(Store(tmp_path)), 8, dict(side="b", text="better"))
    edit, line = lines(tmp_path)
    assert (edit["chosen"], edit["rejected"], edit["tranche"]) == ("better", "right", "edit")
    assert "models" not in edit and edit["prompt"] == line["prompt"]
    assert (line["chosen"], line["rejected"], line["tranche"]) == ("right", "left", "human")
    assert store.talks[TALK].turns()[-1] == ("assistant", "better")
    chosen(opened(store, turn=1, text="And?"), 4, dict(side="b", text="other"), turn=1)
    assert store.talks[TALK].turns()[-1] == ("assistant", "left")   # the edited one wasn't picked
    assert lines(tmp_path)[-1]["prompt"] == (
        "\n\nHuman: What?\n\nAssistant: better\n\nHuman: And?\n\nAssistant:")
    assert lines(tmp_path)[-1]["rejected"] == "right"
    assert len(lines(tmp_path, "weak")) == 1
    assert store.counts() == dict(comparisons=1, edits=2, weak=1, none=0)


def test_the_preference_model_reads_them_at_once(tmp_path):
    store = chosen(opened(Store(tmp_path)), 8, dict(side="b", text="better"))
    rows = read_comparisons(tmp_path)                        # while the store is open
    assert [r["chosen"] for r in rows] == ["better", "right"]
    assert rows[0]["prompt"] == [("human", "What?")]
    store.close()


# ---------------------------------------------------------------- restarts

def test_a_restart_finds_the_talks_and_the_ids(tmp_path):
    store = chosen(opened(Store(tmp_path)), 7)
    chosen(opened(store, turn=1, text="And?"), 0, goes_on="b", turn=1)
    opened(store, turn=2, text="So?")
    opened(store, "harmless", OTHER)
    talks, known, counts = store.talks, store.known, store.counts()
    store.close()
    again = Store(tmp_path)
    assert (again.talks, again.known, again.counts()) == (talks, known, counts)
    assert not again.notes
    assert again.talks[TALK].open["text"] == "So?" and again.talks[OTHER].task == "harmless"
    assert known == {f"{0:032x}": (TALK, 0), f"{1:032x}": (TALK, 1)}
    assert len(lines(tmp_path)) == len(lines(tmp_path, "weak")) == 1


def test_ids_are_known_from_the_lines_alone(tmp_path):
    chosen(opened(Store(tmp_path)), 7).close()
    (tmp_path / "talks.jsonl").unlink()
    assert Store(tmp_path).known == {"0" * 32: (TALK, 0)}


def test_a_second_store_is_refused(tmp_path):
    first = Store(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="another feedback.py writes there; stop it, or choose"):
        Store(tmp_path)
    assert everything(tmp_path) == before
    first.close()
    Store(tmp_path).close()


def test_a_torn_last_line_is_cut_off_and_kept_aside(tmp_path):
    store = chosen(opened(Store(tmp_path)), 7)
    chosen(opened(store, turn=1), 4, turn=1)
    opened(store, turn=2).close()
    whole = everything(tmp_path)
    for name, data in whole.items():
        for cut in (1, 7, len(data.splitlines()[-1]) - 1):
            torn = data[:len(data) - 1 - cut]
            (tmp_path / name).write_bytes(torn)
            store = Store(tmp_path)
            note, = store.notes
            tail = torn[torn.rfind(b"\n") + 1:]
            assert f"{name}: its last line was torn; {len(tail)} bytes moved to torn.txt" in note
            assert (tmp_path / "torn.txt").read_bytes().endswith(b": " + tail + b"\n")
            assert (tmp_path / name).read_bytes() == torn[:len(torn) - len(tail)]
            store.close()
            assert not Store(tmp_path).notes
            for other, content in whole.items():
                (tmp_path / other).write_bytes(content)


def test_a_last_line_without_its_end_is_whole(tmp_path):
    chosen(opened(Store(tmp_path)), 7).close()
    path = tmp_path / "comparisons.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-1])
    store = Store(tmp_path)
    assert not store.notes and path.read_bytes() == before and len(store.lines) == 1
    path.write_bytes(before[:-1])                                     # and while it is open
    chosen(opened(store, turn=1), 7, turn=1)
    assert [x["turn"] for x in lines(tmp_path)] == [0, 1]


def test_a_damaged_line_is_named(tmp_path):
    chosen(opened(Store(tmp_path)), 7).close()
    for name in ("talks.jsonl", "comparisons.jsonl"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\0\0\0\n" + before)
        with pytest.raises(ValueError, match=f"{name} line 1: not a JSON object; mend"):
            Store(tmp_path)
        (tmp_path / name).write_bytes(before)
    first, *rest = (tmp_path / "talks.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "talks.jsonl").write_bytes(b"".join(rest))
    with pytest.raises(ValueError, match="talks.jsonl line 1: does not follow"):
        Store(tmp_path)


BEGIN = dict(talk=TALK, task="helpful")
QUESTION = dict(talk=TALK, turn=0, text="x", answers=["a", "b"], models=["m", "n"],
                cut=[False, True])
CHOICE = dict(talk=TALK, turn=0, id="0" * 32, choice=1, edit=None, goes_on="a")
WRONG = dict(talk=[TALK], task=None, turn=1, text=7, answers=["a"], models=["m", 1], cut=[0, 1],
             id=["x"], choice="1", edit="x", goes_on="c")


def test_events_mended_by_hand(tmp_path):
    """A field that went missing, or is another: told at the start, not in the middle of a talk."""
    rows, path = [BEGIN, QUESTION, CHOICE], tmp_path / "talks.jsonl"
    bad = [rows[:2] + [QUESTION], rows + [CHOICE]]
    for at, row in enumerate(rows):
        for name in row:
            bad.append(rows[:at] + [{k: x for k, x in row.items() if k != name}])
            bad.append(rows[:at] + [{**row, name: WRONG[name]}])
    for some in [rows, *bad]:
        path.write_text("".join(json.dumps(x) + "\n" for x in some))
        if some is rows:
            Store(tmp_path).close()
        else:
            with pytest.raises(ValueError, match=f"talks.jsonl line {len(some)}: does not follow"):
                Store(tmp_path)


def test_lines_mended_by_hand(tmp_path):
    path = tmp_path / "comparisons.jsonl"
    for text in ('{"x": ' * 9999, '{"tranche": "human", "strength": null}',
                 '{"tranche": "human", "models": ["m", 1]}', '{"tranche": "edit", "id": []}'):
        path.write_text(f"{{}}\n{text}\n")
        with pytest.raises(ValueError, match="comparisons.jsonl line 2: .*; mend the line or move"):
            Store(tmp_path)
    path.write_text('{"strength": null, "models": [1, "x"], "id": [], "tranche": "base"}\r\n'
                    + '{"x": ' * 9999)
    assert "torn" in Store(tmp_path).notes[0]


def test_lines_of_others_are_let_be(tmp_path):
    text = '{"prompt": "\\n\\nHuman: x\\n\\nAssistant:", "chosen": "a", "rejected": "b"}\n'
    (tmp_path / "comparisons.jsonl").write_text(text)
    store = chosen(opened(Store(tmp_path)), 7)
    assert store.counts()["comparisons"] == 1 and len(lines(tmp_path)) == 2


def test_a_file_that_is_moved_away_or_replaced(tmp_path):
    """While the store is open, and between two: nothing is lost, nothing written a second time."""
    store = chosen(opened(Store(tmp_path)), 7)
    path = tmp_path / "comparisons.jsonl"
    path.rename(tmp_path / "used.jsonl")
    chosen(opened(store, turn=1), 7, turn=1)
    assert [x["turn"] for x in lines(tmp_path)] == [1]
    (tmp_path / "copy").write_bytes(path.read_bytes())
    (tmp_path / "copy").rename(path)                       # as an editor saves
    chosen(opened(store, turn=2), 7, turn=2)
    assert [x["turn"] for x in lines(tmp_path)] == [1, 2]
    store.close()
    path.rename(tmp_path / "used2.jsonl")
    store = Store(tmp_path)
    assert not lines(tmp_path) and len(store.known) == 3


# ---------------------------------------------------------------- kills and full disks

class Killed(BaseException):
    """What stands for kill -9: nothing catches it."""


def die_at(monkeypatch, number, part):
    """Dies at the number-th write, once `part` of its bytes are there; returns a counter."""
    calls, write = [], os.write

    def dying(fd, data):
        calls.append(len(data))
        if len(calls) == number:
            write(fd, data[:int(part * len(data))])
            raise Killed
        return write(fd, data)

    monkeypatch.setattr(os, "write", dying)
    return calls


@pytest.mark.parametrize("part", [0, 0.5, 1])
@pytest.mark.parametrize("choice", [0, 4, 7])
@pytest.mark.parametrize("edit", [None, dict(side="b", text="better")])
def test_a_kill_at_any_write(tmp_path, monkeypatch, part, choice, edit):
    """What is not there after the restart is sent again; then all is there, and once."""
    for number in range(1, 7):
        folder = tmp_path / str(number)
        store = Store(folder)
        calls = die_at(monkeypatch, number, part)
        died = False
        try:
            chosen(opened(store), choice, edit)
        except Killed:
            died = True
        monkeypatch.undo()
        store.close()
        store = Store(folder)
        if not store.talks.get(TALK) or not store.talks[TALK].questions:
            opened(store)
        if "0" * 32 not in store.known:
            assert not lines(folder) and not lines(folder, "weak")
            chosen(store, choice, edit)
        strong = choice == 7
        assert [x["tranche"] for x in lines(folder)] == ["edit"] * bool(edit) + ["human"] * strong
        assert len(lines(folder, "weak")) == (not strong)
        assert len(store.talks[TALK].choices) == 1
        assert len(store.lines) == len(lines(folder)) + len(lines(folder, "weak"))
        store.close()
        assert Store(folder).counts() == store.counts()
    assert not died and len(calls) == 4 + bool(edit)


def test_a_full_disk_takes_nothing_and_leaves_nothing(tmp_path):
    """Whatever the byte at which it is full, an unsuccessful choice changes no file."""
    sizes = []
    for kind in ("talks", "comparisons"):
        store = chosen(opened(Store(tmp_path / kind)), 7)
        sizes.append(store.paths[kind].stat().st_size)
        store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = 0
    for limit in random.Random(0).sample(range(1, max(sizes)), 24):
        store = opened(Store(tmp_path / f"at{limit}"))
        store.write([("comparisons", dict(prompt="x" * 200))])    # so that its line may be the one
        before, talk = everything(store.folder), repr(store.talks)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            chosen(store, 7, dict(side="a", text="better"))
        except OSError:
            failed += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert everything(store.folder) == before and repr(store.talks) == talk
            assert not store.known and store.counts()["comparisons"] == 0
            chosen(store, 7, dict(side="a", text="better"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(lines(store.folder)) == 3
        store.close()
    assert failed > 12


def test_a_file_that_cannot_be_written_takes_the_event_back(tmp_path):
    """Moved away, and no new one can be made there: a link to nowhere stands for a full disk."""
    store, path = opened(Store(tmp_path)), tmp_path / "comparisons.jsonl"
    before = (tmp_path / "talks.jsonl").read_bytes()
    path.unlink()
    path.symlink_to(tmp_path / "nowhere" / "x")
    with pytest.raises(OSError, match="No such file"):
        chosen(store, 7)
    assert (tmp_path / "talks.jsonl").read_bytes() == before
    path.unlink()
    chosen(store, 7).close()
    assert Store(tmp_path).counts()["comparisons"] == 1


def test_a_disk_that_takes_a_part_and_says_so(tmp_path, monkeypatch):
    store, write = opened(Store(tmp_path)), os.write
    before = everything(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    with pytest.raises(OSError, match="No space left"):
        chosen(store, 7)
    monkeypatch.undo()
    assert everything(tmp_path) == before


def test_a_choice_is_synced_before_it_is_told(tmp_path, monkeypatch):
    """Each file written is synced after the write; a sync that fails takes the choice back."""
    store, events = opened(Store(tmp_path)), []
    write, fsync = os.write, os.fsync

    def name(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "write", lambda fd, x: (events.append(("write", name(fd))),
                                                    write(fd, x))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("sync", name(fd))), fsync(fd))[1])
    if os.path.isdir("/proc/self/fd"):
        chosen(store, 7)
        assert events == [("write", "talks.jsonl"), ("sync", "talks.jsonl"),
                          ("write", "comparisons.jsonl"), ("sync", "comparisons.jsonl")]
    monkeypatch.undo()
    opened(store, turn=1)
    before, calls = everything(tmp_path), []

    def failing(fd):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        chosen(store, 7, turn=1)
    assert everything(tmp_path) == before


def test_lines_are_written_whole(tmp_path, monkeypatch):
    """One write a line: another process that appends can't come between."""
    store, written = opened(Store(tmp_path)), []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (written.append(data), write(fd, data))[1])
    chosen(store, 7, dict(side="b", text="better"))
    assert len(written) == 3 and all(x.endswith(b"\n") and x.count(b"\n") == 1 for x in written)


def test_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    store = Store(tmp_path)

    def work(name):
        for turn in range(60):
            chosen(opened(store, name=name, turn=turn), turn % 9, name=name, turn=turn,
                   id=name[:28] + f"{turn:04x}")

    threads = [threading.Thread(target=work, args=[c * 32]) for c in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [x["id"] for x in lines(tmp_path) + lines(tmp_path, "weak")]
    assert len(ids) == len({*ids}) == 240
    store.close()
    assert Store(tmp_path).counts() == store.counts()


def test_the_red_team_is_turned_round_once(tmp_path):
    """lines_of is what turns it, and what the talk goes on from is not turned."""
    store = opened(Store(tmp_path), "harmless")
    chosen(store, 1)
    (kind, line), = lines_of(TALK, store.talks[TALK], 0)
    assert kind == "comparisons" and line == lines(tmp_path)[0]
    assert (line["chosen"], store.talks[TALK].answer(0)) == ("right", "left")
    assert choices.lines_of is lines_of
