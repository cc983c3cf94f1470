"""The human's page: two answers a turn, a choice between them, its strength (HH 2, fig. 6, D.2).

A person talks to policies; each turn shows two answers, streamed, sides shuffled, from one policy
or from two. In the helpful task the better one is picked, in red-teaming the more harmful one (HH
2.2), with a strength from 1 (A is much better) to 8 (B is). The talk goes on from the picked one.

    python feedback.py --policies out/laptop/distill out/laptop/ppo     prints the page's address
    python feedback.py --policies out/laptop/ppo --best 16           one side: the PM's best of 16
    python feedback.py --policies out/laptop/ppo --terminal             the same without a browser
    python feedback.py --policies out/laptop/ppo --guard out/laptop/guard    declines (ood.py)
    python preference.py --init out/laptop/pm --pairs 0 --data out/laptop/feedback --out out/mine

Each choice is a comparison line in OUT/comparisons.jsonl, on the disk before the page is told;
the weakest choices and ties go to OUT/weak.jsonl. With --best the answers appear only when both
are complete, so that waiting tells nothing (HH B.5). With --guard a message that is out of
distribution is declined before anything is generated, and nothing of it is stored. Wins between
policies become Elo scores as they come (elo.py). One process writes to an OUT; Ctrl-C stops it,
the same command goes on.

The address is this machine's alone. Any other --host is for those who have the token in the printed
URL, over a network where nobody listens in: there is no encryption. Starts in seconds; an answer of
the laptop model begins within 0.1 s on two cores.
"""

import contextlib
import functools
import io
import math
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import bradley_terry
from common import UserError, device_of, entry, keyed, load_source, need_one_vocabulary, uniforms
from data.choices import Store
from data.desk import Desk
from data.screen import Stream, columns, printable
from data.tokenizer import Tokenizer, fit, loads
from data.web import Refused, Server
from elo import wins_of
from guard import load as load_guard
from model import GPT, generate, unpack
from rollout import pm_scores, ranking

PAGE = Path(__file__).parent / "data" / "page"
FILES = {"/": (PAGE / "index.html", "text/html; charset=utf-8"),
         "/page.css": (PAGE / "page.css", "text/css; charset=utf-8"),
         "/page.js": (PAGE / "page.js", "text/javascript; charset=utf-8")}
TASKS = {"helpful": "Ask for help with a text: a question, a plan, something to write. Pick the "
                    "more helpful and honest answer; lying isn't helpful.",
         "harmless": "Red team: try to get harmful answers, and pick the MORE harmful one. You may "
                     "read upsetting things; /helpful takes you back at any time."}


@dataclass(frozen=True)
class Config:
    policies: tuple = ("out/laptop/distill", "out/laptop/ppo")  # those that answer; blanks, commas
    out: str = "out/laptop/feedback"   # the folder of choices and talks
    different: float = 0.5             # share of turns whose answers are from two policies
    best: int = 1                      # answers of which one side shows the best by pm; 1: no pm
    both: bool = False                 # of best: both sides do
    pm: str = "out/laptop/pm"          # of best: the preference model that picks
    guard: str = ""                    # guard of ood.py, which declines messages unlike its own
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # sampling temperature, 0.01 to 100
    top_p: float = 1.0                 # sample from the smallest set of tokens that has this mass
    host: str = "127.0.0.1"            # address to listen on; another than this machine's: a token
    port: int = 8000                   # 0: a free one
    token: str = ""                    # of another host: the secret in the URL; empty: a new one
    terminal: bool = False             # ask in the terminal, no server
    seed: int = 0                      # of sides, policies and answers
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure part

def players_of(cfg, policies, talk, turn):
    """Who answers: [(policy, how many answers it may pick the best of)] of side A and of side B.

    policies: how many there are. A function of (seed, talk, turn).
    """
    rng = keyed(cfg.seed, "feedback", talk, turn)
    first, second = rng.permutation(policies)[:2] if policies > 1 else (0, 0)
    if rng.random() >= cfg.different:
        second = first
    players = [(int(first), cfg.best), (int(second), cfg.best if cfg.both else 1)]
    return players[::-1] if rng.random() < 0.5 else players


def name_of(policy, best):
    """A player's name in the lines: the best of k is another player than its policy."""
    return f"{policy} best of {best}" if best > 1 else policy


def elo_table(lines, zero):
    """{"helpful": [rows], "harmless": [rows], "note"}: Elo scores, best first, by objective.

    lines: of the Store. zero: the policy whose score is 0, if it has played. What has no bound, or
    no meaning, is None.
    """
    out, notes = {}, []
    for objective in ("helpful", "harmless"):
        names, wins = wins_of([x for x in lines if x.get("tranche") == "human"
                               and x.get("objective") == objective])
        out[objective] = []
        if not names:
            continue
        found = bradley_terry.fit(wins, names.index(zero) if zero in names else 0)
        notes += [f"{objective}: {found['note']}"] if found["note"] else []
        for i, name in enumerate(names):
            row = {k: found[k][i] for k in ("elo", "low", "high", "games")}
            out[objective].append({"name": name, **{
                k: round(x, 2) if math.isfinite(x) else None for k, x in row.items()}})
        out[objective].sort(key=lambda row: (row["elo"] is None, -(row["elo"] or 0)))
    return {**out, "note": "; ".join(notes)}


# ---------------------------------------------------------------- answers

@dataclass
class Speaker:
    """A policy that answers."""
    name: str
    tok: Tokenizer
    model: GPT


class Panel:
    """The policies that answer, and the preference model that picks; what data/desk.py asks of."""

    def __init__(self, cfg, speakers, pm=None, guard=None):
        self.cfg, self.speakers, self.pm = cfg, speakers, pm
        self.guard, self.declined = guard, 0
        self.names = [speaker.name for speaker in speakers]
        models = [speaker.model for speaker in speakers] + [pm] * bool(pm)
        self.room = min(m.config.n_ctx for m in models) - cfg.new - 1    # 1: the PM's <|eoc|>
        if self.room < 8:
            raise UserError(f"--new {cfg.new} leaves no room for a message: lower it")

    def table(self, lines):
        return elo_table(lines, self.names[0])

    def drawn(self, name, turn):
        return "ab"[keyed(self.cfg.seed, "goes on", name, turn).integers(2)]

    def held(self, job):
        """With best-of-k, both answers appear when both are complete: waiting tells nothing (B.5).
        """
        return any(best > 1 for _, best, _ in job.plan)

    def prepare(self, name, turn, turns):
        """[(policy, best of how many, prompt's ids)] of side A and of side B.

        Refused if the guard declines the message.
        """
        players = players_of(self.cfg, len(self.speakers), name, turn)
        plan = [(policy, best, self.prompt(policy, turns)) for policy, best in players]
        if self.guard and (refusal := self.guard.refusal(turns)):
            self.declined += 1
            raise Refused(422, refusal)
        return plan

    def prompt(self, policy, turns):
        """Ids of as much of the talk as fits. A question and its answer take 4 ids at least."""
        tok = self.speakers[policy].tok
        ids = fit(tok, turns[-(2 * (self.room // 4) + 1):], self.room)
        if ids is None:
            long = len(tok.render(turns[-1:], answer=True))
            raise Refused(400, f"the message is too long: {long} tokens, {self.room} can be read; "
                               "shorten it")
        return ids

    def answer(self, job):
        """(texts, names, whether cut off) of side A and B."""
        told, sides = self.sample(job), []
        for (policy, best, prompt), some in zip(job.plan, told, strict=True):
            pick = 0
            if best > 1:
                tok = self.speakers[policy].tok
                scores = pm_scores(self.pm, tok, [prompt + ids for ids, _, _ in some]).tolist()
                pick = int(ranking(scores, [ended for _, _, ended in some]).argmax())
            _, text, ended = some[pick]
            sides.append((text, name_of(self.names[policy], best), not ended))
        return tuple(map(list, zip(*sides, strict=True)))

    def sample(self, job):
        """[(ids, their text, whether they end the turn)] of each side, as many as it picks from.

        A policy that has both sides reads its prompt once and writes both at once. Answer j of a
        side depends on (seed, talk, turn, side, j).
        """
        cfg, out, held = self.cfg, ([], []), self.held(job)
        for policy in dict.fromkeys(policy for policy, _, _ in job.plan):
            speaker = self.speakers[policy]
            sides = [i for i in (0, 1) if job.plan[i][0] == policy]
            of = [i for i in sides for _ in range(job.plan[i][1])]        # row -> side
            random = torch.cat([uniforms(range(job.plan[i][1]), cfg.new, cfg.seed, "feedback",
                                         job.talk, job.turn, "ab"[i]) for i in sides])
            streams = [Stream(speaker.tok, (lambda piece: None) if held else
                              functools.partial(job.piece, "ab"[i])) for i in of]

            def on_token(row, token, streams=streams):
                streams[row](row, token)

            tokens, lengths, _ = generate(
                speaker.model, [job.plan[sides[0]][2]], cfg.new, random, len(of), cfg.temperature,
                top_p=cfg.top_p, stops=speaker.tok.stops, pad=speaker.tok.pad, on_token=on_token)
            for i, stream, ids, n in zip(of, streams, tokens.tolist(), lengths.tolist()):
                stream.close()
                out[i].append((ids[:n], stream.text, ids[n - 1] == speaker.tok.eot))
        return out


def load(cfg):
    """The Panel of --policies, with the PM where sides pick. UserError if one can't be used."""
    names = [x for given in cfg.policies for x in given.split(",") if x]
    if not names or len({*names}) < len(names):
        raise UserError("--policies: name one folder or more, each once")
    device, sources = device_of(cfg.device), {x: load_source(x, scalar=False) for x in names}
    speakers = [Speaker(x, loads(it["tokenizer"]), unpack(it, device).eval())
                for x, it in sources.items()]
    guard = load_guard(cfg.guard, device) if cfg.guard else None
    if cfg.best == 1:
        return Panel(cfg, speakers, guard=guard)
    content = load_source(cfg.pm, scalar=True)
    need_one_vocabulary(cfg.pm, content, sources)
    return Panel(cfg, speakers, unpack(content, device).eval(), guard)


# ---------------------------------------------------------------- the terminal

def terminal(desk, lines):
    """The page's talk with what is typed: messages, and a choice after each two answers."""
    task, talk, turn = "helpful", None, 0
    say(TASKS[task], "/red and /helpful change the task, /quit leaves")
    while (text := ask_for(lines, "\nHuman: ")) not in (None, "/quit"):
        if text in ("/red", "/helpful"):
            task, talk = {"/red": "harmless"}.get(text, "helpful"), None
            say(TASKS[task])
        elif text:
            if talk is None:
                talk, turn = secrets.token_hex(16), 0
                desk.new(dict(talk=talk, task=task))
            try:
                *_, last = desk.ask(dict(talk=talk, turn=turn, text=text))
            except (Refused, OSError) as error:
                last = {"error": error}
            if "error" in last:
                say(f"{last['error']}")
                continue
            cells = [f"{x.upper()}\n\n{printable(last[x])}"
                     + "\n[cut off at --new tokens]" * last["cut"][x] for x in "ab"]
            print(columns(cells, shutil.get_terminal_size().columns), flush=True)
            if not choose(desk, lines, task, dict(talk=talk, turn=turn, id=secrets.token_hex(16))):
                return
            turn += 1


def choose(desk, lines, task, fields):
    """A choice for the open question, /edit a or b before it at will; False if the person left."""
    better = "better" if task == "helpful" else "more harmful"
    say(f"Which is {better}? A much 1 2 3 4 slightly, B slightly 5 6 7 8 much, neither 0; "
        "/edit a, /edit b")
    while (text := ask_for(lines, "Choice: ")) not in (None, "/quit"):
        if text in ("/edit a", "/edit b"):
            fields["edit"] = dict(side=text[-1], text=ask_for(lines, "Better: ") or "")
        elif text not in [*"012345678"]:
            say("a number from 0 to 8")
        else:
            try:
                done = desk.choose({**fields, "choice": int(text)})
            except (Refused, OSError) as error:       # an edit that is none; a full disk
                fields.pop("edit", None)
                say(f"nothing was stored: {error}")
                continue
            say("A was {a}, B was {b}; kept as: {kept}".format(**done["revealed"], **done))
            return True
    return False


def ask_for(lines, label):
    """A typed line, None at the end of the input."""
    if lines.isatty():
        print(label, end="", flush=True)
    line = next(lines, None)
    return line if line is None else line.strip()


def say(*lines):
    """What is no answer goes to stderr; a terminal that was closed is no reason to fail."""
    with contextlib.suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the program

def serve(cfg, desk):
    """The page, until Ctrl-C."""
    try:
        server = Server(cfg.host, cfg.port, FILES, desk.routes, cfg.token)
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(f"--host {cfg.host} --port {cfg.port}: can't listen there ({error}); "
                        "--port 0 takes a free one") from None
    with server:
        desk.log = say
        print(f"feedback: {server.url}", flush=True)
        server.serve_forever(poll_interval=0.1)


def main(cfg):
    if cfg.new < 1 or cfg.best < 1 or not 0 <= cfg.different <= 1:
        raise UserError("--new and --best must be at least 1, --different from 0 to 1")
    if not 0.01 <= cfg.temperature <= 100 or not 0 < cfg.top_p <= 1:
        raise UserError("--temperature goes from 0.01 to 100, --top-p from above 0 to 1")
    if not re.fullmatch("[A-Za-z0-9_.~-]*", cfg.token):
        raise UserError("--token: letters, digits and _.~- only, since it is part of an address")
    panel = load(cfg)
    try:
        store = Store(cfg.out)
    except ValueError as error:
        raise UserError(error) from None
    say(*store.notes)
    for stream in filter(None, (sys.stdin, sys.stdout)):
        stream.reconfigure(errors="replace")  # input that is no UTF-8, a terminal that is ASCII
    desk = Desk(store, panel)
    try:
        terminal(desk, sys.stdin or io.StringIO()) if cfg.terminal else serve(cfg, desk)
    except KeyboardInterrupt:
        say("")
    finally:
        desk.stop()
        told = ", ".join(f"{kind} {n}" for kind, n in store.counts().items())
        say(f"{store.folder}: choices stored: {len(store.known)} ({told})"
            + (f"; messages declined: {panel.declined}" if cfg.guard else ""))


if __name__ == "__main__":
    entry(main, Config, __doc__)
