"""A person's browser, as far as tests need one; the page's server in this process, or another's."""

import http.client
import itertools
import json
import secrets
import threading
import time

import feedback
from data.choices import Store
from data.desk import Desk
from data.web import Server


class Fake:
    """A panel without models: two letters a turn, at once."""
    names = ["m1", "m2"]
    wait = None

    def prepare(self, name, turn, turns):
        return None

    def answer(self, job):
        for side in "ab":
            job.piece(side, side)
        if self.wait:
            self.wait.wait(20)
        return [f"a{job.turn}", f"b{job.turn}"], ["m1", "m2"], [False, False]

    def held(self, job):
        return False

    def drawn(self, name, turn):
        return "a"

    def table(self, lines):
        return {"games": len(lines)}


class Site:
    """A server in this process and a client of it."""

    def __init__(self, folder, panel, host="127.0.0.1", token=""):
        self.names = itertools.count()
        self.store = Store(folder)
        self.desk = Desk(self.store, panel)
        self.server = Server(host, 0, feedback.FILES, self.desk.routes, token)
        self.port = self.server.port
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.02], daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.desk.stop()

    def open(self, method, path, body=None, headers=(), **more):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        send = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **dict(headers)} if body is not None else (
            dict(headers))
        connection.request(method, path, send, given, **more)
        return connection.getresponse()

    def call(self, method, path, body=None, headers=(), **more):
        """(status, the reply's object)"""
        reply = self.open(method, path, body, headers, **more)
        return reply.status, json.loads(reply.read() or b"null")

    def begin(self, task="helpful", name=None):
        name = name or f"{next(self.names):032x}"
        assert self.call("POST", "/api/new", dict(talk=name, task=task))[0] == 200
        return name

    def ask(self, talk, turn=0, text="Where does the fox live?"):
        """The rows of the stream."""
        reply = self.open("POST", "/api/ask", dict(talk=talk, turn=turn, text=text))
        data = reply.read()
        assert reply.status == 200, data
        return [json.loads(x) for x in data.splitlines()]

    def choose(self, talk, turn=0, choice=1, edit=None, id=None):
        return self.call("POST", "/api/choose", dict(talk=talk, turn=turn, choice=choice, edit=edit,
                                                     id=id or secrets.token_hex(16)))

    def talk(self, name):
        return self.call("GET", f"/api/talk?talk={name}")[1]


def url_of(job):
    """The address that a started program prints."""
    path, end = job.folder / "out", time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text().split()[-1]
        time.sleep(0.005)
    raise TimeoutError(f"{path.read_text()} {(job.folder / 'err').read_text()}")


class Client(Site):
    """Of a server in another process."""

    def __init__(self, url):
        self.port, self.names = int(url.split(":")[2].split("/")[0]), itertools.count()


# ---------------------------------------------------------------- what clients and tests share

def stored(folder, kind="comparisons"):
    path = folder / f"{kind}.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()]


def joined(rows, side):
    return "".join(x["piece"] for x in rows if x.get("side") == side)


def run_all(jobs):
    """Functions side by side; an error in one is raised here."""
    errors = []

    def guard(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
