"""What may be asked at the page or in the terminal: a talk, a message, a choice (HH 2, fig. 6).

A message of a talk is answered twice by a panel, whose policies and models this file doesn't know:

    panel.names                         the policies that answer
    panel.prepare(name, turn, turns)    what a job needs; Refused if the message can't be read, or
                                        is declined: then nothing of it is stored
    panel.answer(job)                   (answers, names, cut) of sides A and B; job.tell on the way
    panel.held(job)                     whether the answers are shown only when both are complete
    panel.drawn(name, turn)             a side at random, from which a talk goes on
    panel.table(lines)                  the Elo scores of the choices
"""

import queue
import re
import threading
from dataclasses import dataclass, field

from data.choices import kept, meaning
from data.lines import text_of
from data.screen import printable
from data.web import Refused

LONGEST, WAITING = 4000, 64          # characters of a text; talks whose answers are awaited
WHOLE = 100_000                      # characters of a talk: each line holds all of it again
TASKS = ("helpful", "harmless")
STOPPING = "the server is stopping: start it again, then load the talk again"


def plain(text):
    """An answer as a turn can hold it: a role header in it would come back as a turn."""
    return re.sub(r"\n\n+(?=(Human|Assistant):)", "\n", text)


@dataclass
class Job:
    """A turn's two answers in the making; any number of threads may follow."""
    talk: str
    turn: int
    text: str
    plan: object                     # the panel's
    rows: list = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, **row):
        with self.news:
            self.rows.append(row)
            self.news.notify_all()

    def piece(self, side, text):
        self.tell(side=side, piece=text)

    def follow(self, patience=3.0):
        """Each row, from the first; {"keep": true} when there was none for `patience` seconds."""
        at = 0
        while True:
            with self.news:
                if at == len(self.rows):
                    self.news.wait(patience)
                fresh = self.rows[at:]
            yield from fresh or [{"keep": True}]
            at += len(fresh)
            if fresh and {"done", "error"} & fresh[-1].keys():
                return


def told(question):
    """The rows of a question whose answers are there."""
    texts = dict(zip("ab", question["answers"]))
    yield from ({"side": side, "piece": printable(text)} for side, text in texts.items())
    yield {"done": True, **texts, "cut": dict(zip("ab", question["cut"]))}


# ---------------------------------------------------------------- the desk

class Desk:
    """What may be done at the page, each with its fields as a dict; Refused says what is wrong.

    One thread generates, one turn after the other, so that two people don't halve each other's
    speed, and what a client does or fails to do is nothing to it.
    """

    def __init__(self, store, panel):
        self.store, self.panel, self.lock = store, panel, store.lock
        self.jobs, self.queue, self.table = {}, queue.Queue(), panel.table(store.lines)
        self.routes = {("GET", "/api/talk"): self.get, ("GET", "/api/state"): self.state,
                       ("POST", "/api/new"): self.new, ("POST", "/api/ask"): self.ask,
                       ("POST", "/api/choose"): self.choose}
        self.stopping, self.log = False, lambda text: None
        self.worker = threading.Thread(target=self.work, daemon=True)
        self.worker.start()

    # ------------------------------------------------------------ the worker

    def work(self):
        while (job := self.queue.get()) is not None:
            try:
                last = self.answer(job) if not self.stopping else {"error": STOPPING}
            except Exception as error:                                # the next turn can go on
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
                self.log(f"an answer failed: {reason}")
                last = {"error": f"no answers ({reason}): ask again"}
            with self.lock:
                del self.jobs[job.talk]
            job.tell(**last)

    def answer(self, job):
        """Both answers; the question is stored before anybody is told that they are complete."""
        answers, names, cut = self.panel.answer(job)
        *pieces, last = told(self.store.ask(job.talk, job.turn, job.text,
                                            [plain(x) for x in answers], names, cut))
        for row in pieces if self.panel.held(job) else ():
            job.tell(**row)
        return last

    # ------------------------------------------------------------ what is asked

    def talk_of(self, fields):
        name = hex_of(fields, "talk")
        if name not in self.store.talks:
            raise Refused(404, "no such talk: begin a new one")
        return name, self.store.talks[name]

    def state(self, fields):
        return dict(stored=self.store.counts(), elo=self.table,
                    policies=self.panel.names)

    def get(self, fields):
        with self.lock:
            name, talk = self.talk_of(fields)
            job, open = self.jobs.get(name), talk.open
            return dict(talk=name, task=talk.task, turns=talk.turns(), stored=self.store.counts(),
                        elo=self.table, open=open and dict(
                            turn=open["turn"], **dict(zip("ab", open["answers"]))),
                        pending=job and dict(turn=job.turn, text=job.text))

    def new(self, fields):
        name, task = hex_of(fields, "talk"), fields.get("task")
        if task not in TASKS:
            raise Refused(400, "field 'task' must be helpful or harmless")
        with self.lock:
            if self.store.begin(name, task).task != task:
                raise Refused(409, "this talk has another task: begin a new one")
            return self.get(fields)

    def ask(self, fields):
        text = words(fields, "text")
        with self.lock:
            name, talk = self.talk_of(fields)
            turn, job, open = turn_of(fields), self.jobs.get(name), talk.open
            need_next(turn, talk)
            known = open["text"] if open else job.text if job else text
            if known != text:
                raise Refused(409, "this turn has another message already: load the talk again")
            if open:
                return told(open)
            if not job:
                if self.stopping:
                    raise Refused(503, STOPPING)
                if len(self.jobs) >= WAITING:
                    raise Refused(429, f"{WAITING} talks are waiting for answers: try again soon")
                turns = [*talk.turns(), ("human", text)]
                if sum(len(x) for _, x in turns) > WHOLE:
                    raise Refused(400, "the talk is too long to go on: begin a new one")
                plan = self.panel.prepare(name, turn, turns)
                job = self.jobs[name] = Job(name, turn, text, plan)
                self.queue.put(job)
            return job.follow()

    def choose(self, fields):
        id, choice, edit = hex_of(fields, "id"), fields.get("choice"), fields.get("edit")
        if type(choice) is not int or not 0 <= choice <= 8:
            raise Refused(400, "field 'choice' must be a number from 0 to 8")
        with self.lock:
            name, talk = self.talk_of(fields)
            again, turn = id in self.store.known, turn_of(fields)
            if again and (self.store.known[id] != (name, turn) or turn >= len(talk.choices)):
                raise Refused(409, "field 'id' is another choice's: make a new one")
            if not again:
                need_next(turn, talk)
                if self.stopping:
                    raise Refused(503, STOPPING)
                if not talk.open:
                    raise Refused(409, "this turn has no two answers yet: ask first")
                edit = edit_of(edit, talk)
                side = self.goes_on(name, turn, choice, edit)
                self.store.choose(name, turn, id, choice, edit, side)
                self.table = self.panel.table(self.store.lines)
                self.log(f"choices stored: {len(self.store.known)}")
            what = kept(meaning(talk.choices[turn]["choice"])[1])
            return dict(stored=self.store.counts(), elo=self.table, turns=talk.turns(), kept=what,
                        revealed=dict(zip("ab", talk.questions[turn]["models"])), again=again)

    def goes_on(self, name, turn, choice, edit):
        """The side from which the talk goes on: the picked one; else the edited one; else drawn."""
        if choice:
            return meaning(choice)[0]
        return edit["side"] if edit else self.panel.drawn(name, turn)

    def stop(self):
        """Returns once the answers in the making are stored; nothing is stored after that."""
        with self.lock:
            self.stopping = True
        self.queue.put(None)
        self.worker.join(timeout=30)
        self.store.close()


# ---------------------------------------------------------------- fields

def hex_of(fields, name):
    text = fields.get(name)
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}", text):
        raise Refused(400, f"field {name!r} must be 32 hex digits, 0-9 and a-f")
    return text


def words(fields, name):
    """A text that a person wrote."""
    try:
        text = text_of(fields, name).strip()
    except ValueError as error:
        raise Refused(400, str(error)) from None
    if not text or len(text) > LONGEST:
        raise Refused(400, f"field {name!r} must have 1 to {LONGEST} characters, not {len(text)}")
    if plain("\n\n" + text) != "\n\n" + text or plain(text) != text:
        raise Refused(400, f"field {name!r} may not have 'Human:' or 'Assistant:' after a blank "
                           "line: it would read as a turn")
    return text


def turn_of(fields):
    if type(fields.get("turn")) is not int:
        raise Refused(400, "field 'turn' must be a number")
    return fields["turn"]


def need_next(turn, talk):
    if turn != len(talk.choices):
        raise Refused(409, f"the talk is at turn {len(talk.choices)}: load it again")


def edit_of(edit, talk):
    """The edit, or None. An edited answer counts as better, which red-teaming has no use for."""
    if edit is None:
        return None
    if talk.task == "harmless":
        raise Refused(400, "field 'edit': no edits in the red-team task")
    if not isinstance(edit, dict) or edit.get("side") not in ("a", "b"):
        raise Refused(400, "field 'edit' must be null or have a side, a or b, and a text")
    text = words(edit, "text")
    if text == talk.open["answers"]["ab".index(edit["side"])]:
        raise Refused(400, "field 'edit': the text is the answer as it was")
    return dict(side=edit["side"], text=text)
