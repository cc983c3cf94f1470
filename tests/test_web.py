"""The page's server as a stranger meets it: refusals, other sites' pages, slow and many clients.

Proved alive by, in data/web.py: Host not checked, or without its port; foreign names let in; Origin
not checked; no token, or one on request only; bodies of any size; Transfer-Encoding, other content
types let through; RecursionError let through; a full disk as a 500; time per byte and not per
request; no time limit on a stream; connections without a number; hanging up on who still sends. In
data/desk.py: talks that wait without a number; a choice true for 1; choices after the stop.
"""

import http.client
import json
import os
import socket
import threading
import time

import pytest
from visits import Fake, Site, stored

import feedback
from data import desk as desks
from data import web

# ---------------------------------------------------------------- refusals

HEX = "ab" * 16
WRONG = [  # method, path, body, headers, status, a word of the reason
    ("GET", "/api/talk", None, {}, 400, "'talk'"),
    ("GET", f"/api/talk?talk={HEX}", None, {}, 404, "begin a new one"),
    ("GET", "/api/talk?talk=../x", None, {}, 400, "'talk'"),
    ("GET", "/nothing", None, {}, 404, "no such address"),
    ("GET", "/data/page/index.html", None, {}, 404, "no such"),
    ("GET", "/../common.py", None, {}, 404, "no such"),
    ("GET", "/api/ask", None, {}, 405, "GET"),
    ("POST", "/api/talk", {}, {}, 405, "GET"),
    ("POST", "/", {}, {}, 405, "GET"),
    *((m, "/api/state", None, {}, 405, "") for m in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH",
                                                     "TRACE", "FOO")),
    ("POST", "/api/new", b"{", {}, 400, "JSON"),
    ("POST", "/api/new", b"\xff\xfe", {}, 400, "JSON"),
    ("POST", "/api/new", b"[" * 60000, {}, 400, "JSON"),
    ("POST", "/api/new", b"1" * 60000, {}, 400, "JSON"),
    ("POST", "/api/new", [], {}, 400, "object"),
    ("POST", "/api/new", dict(talk=HEX), {}, 400, "'task'"),
    ("POST", "/api/new", dict(talk=HEX, task=["helpful"]), {}, 400, "'task'"),
    ("POST", "/api/new", dict(talk=HEX.upper(), task="helpful"), {}, 400, "'talk'"),
    ("POST", "/api/new", dict(talk=5, task="helpful"), {}, 400, "'talk'"),
    ("POST", "/api/new", {}, {"Content-Type": "text/plain"}, 415, "application/json"),
    ("POST", "/api/new", {}, {"Content-Type": "application/x-www-form-urlencoded"}, 415, "json"),
    ("POST", "/api/new", b"x" * (64 * 1024 + 1), {}, 413, "bytes"),
    ("POST", "/api/new", b"{}", {"Content-Length": "-1"}, 400, "Content-Length"),
    ("POST", "/api/new", b"{}", {"Content-Length": "9" * 5000}, 413, "bytes"),
    ("POST", "/api/ask", dict(talk=HEX, turn=0, text="x"), {}, 404, "talk"),
    ("POST", "/api/ask", dict(talk="T", turn=1, text="x"), {}, 409, "at turn 0"),
    ("POST", "/api/ask", dict(talk="T", turn=-1, text="x"), {}, 409, "at turn 0"),
    ("POST", "/api/ask", dict(talk="T", turn=True, text="x"), {}, 400, "'turn'"),
    ("POST", "/api/ask", dict(talk="T", turn=0.0, text="x"), {}, 400, "'turn'"),
    ("POST", "/api/ask", dict(talk="T", text="x"), {}, 400, "'turn'"),
    ("POST", "/api/ask", dict(talk="T", turn=0), {}, 400, "'text'"),
    ("POST", "/api/ask", dict(talk="T", turn=0, text=" \n"), {}, 400, "'text'"),
    ("POST", "/api/ask", dict(talk="T", turn=0, text=7), {}, 400, "'text'"),
    ("POST", "/api/ask", dict(talk="T", turn=0, text="x" * 4001), {}, 400, "4000"),
    ("POST", "/api/ask", b'{"talk": "TT", "turn": 0, "text": "\\ud800"}', {}, 400, "surrogate"),
    ("POST", "/api/ask", dict(talk="T", turn=0, text="x\n\nAssistant: y"), {}, 400, "turn"),
    ("POST", "/api/ask", dict(talk="T", turn=0, text="Human: y \n\nHuman: z"), {}, 400, "turn"),
    ("POST", "/api/choose", dict(talk="T", turn=0, id=HEX, choice=1), {}, 409, "ask first"),
    ("POST", "/api/choose", dict(talk="T", turn=0, id="x", choice=1), {}, 400, "'id'"),
    *(("POST", "/api/choose", dict(talk="T", turn=0, id=HEX, choice=c), {}, 400, "'choice'")
      for c in (9, -1, "1", None, 1.0, True)),
]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    one = Site(tmp_path_factory.mktemp("quiet") / "store", Fake())
    one.name = one.begin()
    yield one
    one.close()


@pytest.mark.parametrize("case", WRONG, ids=lambda x: f"{x[0]}{x[1][:12]}-{x[4]}")
def test_wrong_requests_get_a_reason(quiet, case, capsys):
    method, path, body, headers, status, word = case
    if isinstance(body, dict) and body.get("talk") == "T":
        body = {**body, "talk": quiet.name}
    if isinstance(body, bytes):
        body = body.replace(b"TT", quiet.name.encode())
    reply = quiet.open(method, path, body, headers)
    data = reply.read()
    assert reply.status == status and "default-src 'none'" in reply.headers[
        "Content-Security-Policy"]
    if method == "HEAD":
        assert data == b""
    else:
        told = json.loads(data)
        assert [*told] == ["error"] and word in told["error"] and "\n" not in told["error"]
    if status == 405:
        assert reply.headers["Allow"] == "GET, POST"
    assert quiet.call("GET", "/api/state")[0] == 200
    assert capsys.readouterr().err == ""


def raw(port, data, timeout=20):
    """The first line of the answer to bytes, and what comes after it."""
    with socket.create_connection(("127.0.0.1", port), timeout) as s:
        s.sendall(data)
        got = b""
        while part := s.recv(65536):
            got += part
    return got.partition(b"\r\n")[0].decode(), got


def test_requests_that_no_library_sends(quiet, capsys):
    host = f"Host: 127.0.0.1:{quiet.port}\r\n".encode()
    post = b"POST /api/new HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
    for data, status in (
            (post + b"\r\n{}", 411), (post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}", 411),
            (post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 411),
            (post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 411),
            (post + b"Content-Length: 2\r\nTransfer-Encoding:\r\nTransfer-Encoding: chunked\r\n"
             b"\r\n{}", 411),
            (post + b"Content-Length: 99999999\r\n\r\n", 413),
            (post + b"Content-Length: +2\r\n\r\n{}", 400),
            (b"GET / HTTP/1.1\r\n\r\n", 403), (b"GET / HTTP/1.0\r\n\r\n", 403),
            (b"GET / HTTP/1.1\r\n" + host * 2 + b"\r\n", 403),
            (b"GET /api/state HTTP/1.1\r\n" + host + b"Origin: http://" + host[6:]
             + b"Origin: http://evil.example\r\n\r\n", 403),
            (b"GET http://evil.example/api/state HTTP/1.1\r\n" + host + b"\r\n", 403),
            (b"nonsense\r\n\r\n", 400), (b"GET / HTTP/9.9\r\n\r\n", 505),
            (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
            (b"GET http://[ HTTP/1.1\r\n" + host + b"\r\n", 400),
            (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431)):
        begin = time.monotonic()
        line, got = raw(quiet.port, data)
        assert line.split()[1] == str(status), (data[:80], got[:200])
        assert b"nosniff" in got and json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        assert time.monotonic() - begin < 3
    assert "Traceback" not in capsys.readouterr().err


def test_who_still_sends_gets_the_refusal(quiet):
    """What is sent after it is not read into memory, and doesn't take the answer away."""
    with socket.create_connection(("127.0.0.1", quiet.port), 20) as s:
        s.sendall(f"POST /api/new HTTP/1.1\r\nHost: 127.0.0.1:{quiet.port}\r\n"
                  "Content-Length: 500000\r\n\r\n".encode())
        for _ in range(10):
            s.sendall(b"x" * 50000)
            time.sleep(0.01)
        got = b""
        while part := s.recv(65536):
            got += part
    assert got.startswith(b"HTTP/1.1 413") and b"send less" in got


def test_only_the_own_host_and_origin(quiet):
    port = quiet.port

    def status(host=None, origin=None, path="/api/state"):
        headers = {"Host": host} if host else {}
        return quiet.call("GET", path, headers={**headers, **({"Origin": origin} if origin else {})
                                                })[0]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert status(host) == 200, host
        assert status(host, f"http://{host}") == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}",
                 f"192.168.0.7:{port}", f"x@127.0.0.1:{port}", f"127.0.0.1:{port}/x", "[", "",
                 f"127.0.0.1.evil.example:{port}", f"localhost:{port}x", f"localhost:{port}#"):
        assert status(host or " ") == 403, host
        assert status(host or " ", path="/page.js") == 403
    for origin in ("http://evil.example", "null", f"http://localhost:{port + 1}",
                   f"https://127.0.0.1:{port}", f"http://localhost:{port}"):
        assert status(None, origin) == 403, origin
    reply = quiet.open("POST", "/api/new", dict(talk=HEX, task="helpful"),
                       {"Origin": "http://evil.example"})
    assert reply.status == 403 and HEX not in quiet.store.talks
    assert "Access-Control-Allow-Origin" not in reply.headers


def test_the_token_of_another_address(site):
    """0.0.0.0 takes any address as its name, no foreign name, and nobody without the token."""
    for given in ("", "s3cret"):
        one = site(folder=site.folder / (given or "made"), host="0.0.0.0", token=given)
        token = one.server.url.partition("#token=")[2]
        assert token == given if given else len(token) >= 20
        for told, status in (({}, 403), ({"X-Token": "wrong"}, 403), ({"X-Token": ""}, 403),
                             ({"X-Token": "\u00e9"}, 403), ({"X-Token": token}, 200)):
            assert one.call("GET", "/api/state", headers=told)[0] == status
        for host, status in ((f"192.168.0.7:{one.port}", 200), (f"evil.example:{one.port}", 403)):
            assert one.call("GET", "/api/state", headers={"Host": host, "X-Token": token}
                            )[0] == status
        assert one.call("POST", "/api/new", dict(talk=HEX, task="helpful"))[0] == 403
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {}):
            assert token not in str(one.call("GET", "/api/state", headers=headers))
        assert one.open("GET", "/page.js").status in (200, 404)          # files need none
    one = site(folder=site.folder / "own")
    assert "#" not in one.server.url and one.server.url == f"http://127.0.0.1:{one.port}/"


def test_the_files_and_their_headers(quiet, tmp_path, monkeypatch):
    for name in ("index.html", "page.css", "page.js"):
        (tmp_path / name).write_text(f"this is {name}")
    monkeypatch.setattr(quiet.server, "files", {
        k: (tmp_path / path.name, kind) for k, (path, kind) in feedback.FILES.items()})
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"),
                       ("/page.js", "text/javascript"), ("/?x=1", "text/html")):
        reply = quiet.open("GET", path)
        assert reply.status == 200 and reply.read().startswith(b"this is ")
        assert reply.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Referrer-Policy"] == "no-referrer"
        assert reply.headers["Cache-Control"] == "no-store"
        policy = reply.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'",
                "base-uri 'none'", "form-action 'none'", "connect-src 'self'"} <= {*policy}
        assert "unsafe" not in str(policy)
    (tmp_path / "page.js").unlink()
    assert quiet.call("GET", "/page.js")[0] == 404


# ---------------------------------------------------------------- slow and many

def drips(s):
    """Sends a byte; whether the connection still stands."""
    s.settimeout(0.001)
    try:
        s.sendall(b"x")
        return bool(s.recv(65536))
    except TimeoutError:
        return True
    except OSError:
        s.close()
        return False


def test_slow_clients_hold_nobody_up(site, monkeypatch):
    """Slow headers, a slow body, bytes that drip, a stream that nobody reads: others are answered,
    and who is slow is hung up on.
    """
    monkeypatch.setattr(web, "PATIENCE", 1.0)
    fake = Fake()
    answer = fake.answer

    def long(job):
        for _ in range(200 if job.text == "long" else 0):
            job.piece("a", "x" * 100000)
        return answer(job)

    fake.answer = long
    one = site(fake)
    name, idle = one.begin(), one.begin()
    head = f"Host: 127.0.0.1:{one.port}\r\nContent-Type: application/json\r\n"
    unread = dict(talk=idle, turn=0, text="long")
    starts = [b"", b"GET / HTTP/1.1\r\nHost: 1", f"POST /api/new HTTP/1.1\r\n{head}".encode(),
              f"POST /api/new HTTP/1.1\r\n{head}Content-Length: 500\r\n\r\n{{".encode(),
              f"POST /api/new HTTP/1.1\r\n{head}Content-Length: 50000000\r\n\r\n{{".encode()]
    begin, slow = time.monotonic(), []
    for start in starts * 8:
        slow.append(socket.create_connection(("127.0.0.1", one.port), 20))
        slow[-1].sendall(start)
    text = json.dumps(unread)
    nobody = socket.create_connection(("127.0.0.1", one.port), 20)
    nobody.sendall(f"POST /api/ask HTTP/1.1\r\n{head}Content-Length: {len(text)}\r\n\r\n{text}"
                   .encode())
    for turn in range(10):
        for s in slow:
            try:
                s.sendall(b"x")                                        # a byte now and then
            except OSError:
                pass
        assert one.ask(name, turn)[-1]["done"] and one.choose(name, turn)[0] == 200
        time.sleep(0.02)
    patience = float(os.environ.get("NANOHH_PATIENCE", 1))
    assert time.monotonic() - begin < 5 * patience
    while slow and time.monotonic() < begin + 8 * patience:            # and so on, to no end
        slow = [s for s in slow if drips(s)]
        time.sleep(0.05)
    assert not slow
    deadline = time.monotonic() + 20
    while one.server.room._value < web.CONNECTIONS and time.monotonic() < deadline:
        time.sleep(0.02)
    assert one.server.room._value == web.CONNECTIONS               # the unread stream too
    nobody.close()
    assert one.ask(idle, 0, "long")[-1]["done"]


def test_more_connections_than_are_taken(site, monkeypatch):
    monkeypatch.setattr(web, "CONNECTIONS", 4)
    one = site()
    held = [socket.create_connection(("127.0.0.1", one.port), 20) for _ in range(4)]
    time.sleep(0.1)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        one.call("GET", "/api/state")
    held.pop().close()
    time.sleep(0.1)
    assert one.call("GET", "/api/state")[0] == 200
    for s in held:
        s.close()


def test_too_many_talks_that_wait(site, monkeypatch):
    monkeypatch.setattr(desks, "WAITING", 3)
    fake = Fake()
    fake.wait = threading.Event()
    one = site(fake)
    names = [one.begin() for _ in range(4)]
    asked = [one.open("POST", "/api/ask", dict(talk=n, turn=0, text="x")) for n in names[:3]]
    assert one.call("POST", "/api/ask", dict(talk=names[3], turn=0, text="x"))[0] == 429
    assert one.call("GET", "/api/state")[0] == 200                 # others are answered
    fake.wait.set()
    assert all(json.loads(r.read().splitlines()[-1])["done"] for r in asked)
    assert one.ask(names[3])[-1]["done"]


def test_stopping(site):
    fake = Fake()
    fake.wait = threading.Event()
    one = site(fake)
    names = [one.begin() for _ in range(3)]
    asked = [one.open("POST", "/api/ask", dict(talk=n, turn=0, text="x")) for n in names[:2]]
    asked[0].readline()
    threading.Timer(0.2, fake.wait.set).start()
    one.desk.stop()                       # waits for the answers in the making
    rows = [json.loads(r.read().splitlines()[-1]) for r in asked]
    assert rows[0]["done"] and "stopping" in rows[1]["error"]
    assert one.call("POST", "/api/ask", dict(talk=names[2], turn=0, text="x"))[0] == 503
    assert one.choose(names[0])[0] == 503 and not stored(site.folder)
