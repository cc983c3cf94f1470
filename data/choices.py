"""What a person chose between two answers, on disk: never lost, never doubled (HH 2, D.2).

    talks.jsonl        events: a talk begins; its open question, two answers; the choice
    comparisons.jsonl  lines that preference.py reads: choices of strength 2 to 4, and edits
    weak.jsonl         kept and not trained on: the weakest strength, and no preference (HH 2.2)
    torn.txt           what a power cut left half-written

Each change is appended by one write and synced before anybody is told; if the disk is full it is
taken back. The event of a choice comes first and its lines after it, so what a kill left between
the two is made up for at the next start. A choice has an id: told again, it is known.
"""

import errno
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from data.tokenizer import join

try:
    import fcntl
except ImportError:    # Windows: nothing keeps a second server out
    fcntl = None


KINDS = ("talks", "comparisons", "weak")
EVENTS = ("talk task", "talk turn text answers models cut", "talk turn id choice edit goes_on")


# ---------------------------------------------------------------- a choice as lines

def meaning(choice):
    """(side picked, strength): 1..4 is A, 5..8 is B; strength 4 is much, 1 slightly, 0 neither."""
    if choice == 0:
        return "a", 0
    return ("a", 5 - choice) if choice <= 4 else ("b", choice - 4)


def kept(strength):
    """What becomes of a choice. HH left the weakest and no preference out of the data (2.2)."""
    return "comparison" if strength > 1 else "weak" if strength else "none"


@dataclass
class Talk:
    """A conversation: choices[T] settles questions[T]; a last question without one is open."""
    task: str
    questions: list = field(default_factory=list)
    choices: list = field(default_factory=list)

    @property
    def open(self):
        return self.questions[-1] if len(self.questions) > len(self.choices) else None

    def turns(self):
        """All turns; the text of an open question is the last one."""
        out = []
        for i, question in enumerate(self.questions):
            out.append(("human", question["text"]))
            if i < len(self.choices):
                out.append(("assistant", self.answer(i)))
        return out

    def answer(self, turn):
        """The answer from which the talk went on after a question, edited if it was."""
        choice = self.choices[turn]
        edit = choice["edit"]
        if edit and edit["side"] == choice["goes_on"]:
            return edit["text"]
        return self.questions[turn]["answers"]["ab".index(choice["goes_on"])]


def lines_of(name, talk, turn):
    """[(kind of file, line)] of a choice: the comparison, and an edit before its original."""
    question, choice = talk.questions[turn], talk.choices[turn]
    side, strength = meaning(choice["choice"])
    better = "ab".index(side)
    if talk.task == "harmless":
        better = 1 - better     # red-team: the person picks the MORE harmful answer; turned round
    worse = 1 - better          # here and nowhere else, so that `chosen` is always the better one
    prompt = join(talk.turns()[:2 * turn + 1], answer=True)
    common = dict(objective=talk.task, annotator="person", talk=name, turn=turn)
    answers, models = question["answers"], question["models"]
    line = dict(prompt=prompt, chosen=answers[better], rejected=answers[worse], tranche="human",
                **common, strength=strength, models=[models[better], models[worse]],
                id=choice["id"])
    out = [("comparisons" if strength > 1 else "weak", line)]
    if choice["edit"]:
        original = "ab".index(choice["edit"]["side"])
        out.insert(0, ("comparisons", dict(
            prompt=prompt, chosen=choice["edit"]["text"], rejected=answers[original],
            tranche="edit", **common, edited=models[original], id=choice["id"] + "-edit")))
    return out


# ---------------------------------------------------------------- files

def synced(path, data=b"", size=None):
    """Appends data to a file, or cuts it to `size`; on the disk when this returns, else OSError.

    Opened each time: a file that was moved or replaced meanwhile is no place for a choice. An end
    that an editor left out of the last line is put there first.
    """
    new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if size is not None:
            os.ftruncate(fd, size)
        else:
            if os.fstat(fd).st_size:
                os.lseek(fd, -1, os.SEEK_END)
                data = data if os.read(fd, 1) == b"\n" else b"\n" + data
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(fd)
    finally:
        os.close(fd)
    if new and os.name == "posix":             # the folder's entry of the file, too
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def repaired(path):
    """Moves a torn last line into torn.txt. Returns what was done, "" if nothing."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    tail = data[whole:]
    if not tail:
        return ""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        synced(path.with_name("torn.txt"), path.name.encode() + b": " + tail + b"\n")
        synced(path, size=whole)
        return f"{path}: its last line was torn; {len(tail)} bytes moved to torn.txt"
    synced(path)                               # whole, but for its end
    return ""


def read(path):
    """The JSON objects of a file's lines. ValueError naming a bad line."""
    out = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            out.append(json.loads(line))
            if not isinstance(out[-1], dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise ValueError(f"{path} line {number}: not a JSON object; mend the line or move the "
                             "file away") from None
    return out


def sound(row, forms):
    """Whether a row has the fields of one of the forms, and what it has is as it was written."""
    def text(x):
        return isinstance(x, str)

    def two(kind):
        return lambda x: isinstance(x, list) and [*map(type, x)] == [kind, kind]

    right = dict(talk=text, task=text, text=text, id=text, answers=two(str), models=two(str),
                 cut=two(bool), turn=lambda x: type(x) is int, choice=lambda x: x in range(9),
                 strength=lambda x: x in range(5), goes_on=lambda x: x in ("a", "b"),
                 edit=lambda x: x is None or (isinstance(x, dict) and x.get("side") in ("a", "b")
                                              and text(x.get("text"))))
    return any({*form.split()} <= row.keys() for form in forms) and all(
        right[name](row[name]) for name in right.keys() & row.keys())


class Store:
    """The choices of a folder and the talks in which they were made; `notes` is what was mended.

    Raises ValueError if another process writes there or a line is none. Its methods may be called
    from any thread; OSError from them means that nothing was stored.
    """

    def __init__(self, folder):
        self.folder, self.lock = Path(folder), threading.RLock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths = {kind: self.folder / f"{kind}.jsonl" for kind in KINDS}
        self.claim = open(self.folder / "lock", "w")  # held open until the process ends
        if fcntl:
            try:
                fcntl.flock(self.claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.claim.close()
                raise ValueError(f"{self.folder}: another feedback.py writes there; stop it, or "
                                 "choose another --out") from None
        try:
            self.notes = [*filter(None, map(repaired, filter(Path.exists, self.paths.values())))]
            self.load()
        except BaseException:
            self.claim.close()
            raise

    def load(self):
        """Reads all, and writes what a kill between a choice's event and its lines left out."""
        moved = {kind for kind, path in self.paths.items() if not path.exists()}
        for kind in moved:
            synced(self.paths[kind])
        self.talks, self.known, self.lines, events = {}, {}, [], read(self.paths["talks"])
        for number, event in enumerate(events, 1):
            try:
                if not sound(event, EVENTS):
                    raise KeyError
                self.apply(event)
            except KeyError:
                raise ValueError(f"{self.paths['talks']} line {number}: does not follow from the "
                                 "lines before, or a field is missing or wrong; mend the line or "
                                 "move the file away") from None
        for path in (self.paths["comparisons"], self.paths["weak"]):
            for number, line in enumerate(read(path), 1):
                if line.get("tranche") in ("human", "edit"):
                    if not sound(line, [""]):
                        raise ValueError(f"{path} line {number}: a field is wrong; mend the line "
                                         "or move the file away")
                    self.lines.append(line)
        ids = {line.get("id") for line in self.lines}
        for line in self.lines:
            if line.get("tranche") == "human":
                self.known.setdefault(line.get("id"), (line.get("talk"), line.get("turn")))
        if events and "choice" in events[-1]:      # only the last one can lack its lines
            name, turn = events[-1]["talk"], events[-1]["turn"]
            for kind, line in lines_of(name, self.talks[name], turn):
                if line["id"] not in ids and kind not in moved:
                    self.write([(kind, line)])
                    self.lines.append(line)

    def apply(self, event):
        """An event's effect on what is in memory."""
        if "task" in event:
            self.talks.setdefault(event["talk"], Talk(event["task"]))
        elif "answers" in event:
            talk = self.talks[event["talk"]]
            if talk.open or event["turn"] != len(talk.questions):
                raise KeyError("turn")
            talk.questions.append(event)
        else:
            talk = self.talks[event["talk"]]
            if not talk.open or talk.open["turn"] != event["turn"]:
                raise KeyError("turn")
            talk.choices.append(event)
            self.known[event["id"]] = event["talk"], event["turn"]

    def write(self, parts):
        """Appends [(kind, row)] in this order, or none of them."""
        done = []
        try:
            for kind, row in parts:
                path = self.paths[kind]
                done.append((path, path.stat().st_size if path.exists() else 0))
                synced(path, json.dumps(row).encode() + b"\n")
        except OSError:
            for path, size in reversed(done):    # the event last: a kill here is made up for
                if path.is_file() and path.stat().st_size > size:
                    synced(path, size=size)
            raise

    # ------------------------------------------------------------ what happens in a talk

    def begin(self, name, task):
        with self.lock:
            if name not in self.talks:
                event = dict(talk=name, task=task)
                self.write([("talks", event)])
                self.apply(event)
            return self.talks[name]

    def ask(self, name, turn, text, answers, models, cut):
        """The turn's question, open from now on; returned."""
        event = dict(talk=name, turn=turn, text=text, answers=answers, models=models, cut=cut)
        with self.lock:
            self.write([("talks", event)])
            self.apply(event)
        return event

    def choose(self, name, turn, id, choice, edit, goes_on):
        """Settles the open question; goes_on is the side from which the talk goes on."""
        event = dict(talk=name, turn=turn, id=id, choice=choice, edit=edit, goes_on=goes_on)
        with self.lock:
            talk = self.talks[name]
            then = Talk(talk.task, talk.questions, [*talk.choices, event])
            lines = lines_of(name, then, turn)
            self.write([("talks", event), *lines])
            self.apply(event)
            self.lines += [line for _, line in lines]

    def counts(self):
        """How many lines of each kind are stored."""
        with self.lock:
            out = dict(comparisons=0, edits=0, weak=0, none=0)
            for line in self.lines:
                if line.get("tranche") == "edit":
                    out["edits"] += 1
                elif line.get("tranche") == "human":
                    kind = kept(line.get("strength", 4))
                    out["comparisons" if kind == "comparison" else kind] += 1
            return out

    def close(self):
        """Lets others in, once what is being written is written."""
        with self.lock:
            self.claim.close()
