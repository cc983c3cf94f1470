"""Downloads from a server in a thread that cuts, redirects, forgets ranges and sends rubbish.

Mutations tried, each caught here: no Range header, a range one byte late, a whole reply appended to
the part, a part that is kept when the sum is wrong, neither size nor sum compared, the file named
before it is checked, a file that is there fetched again, one with a wrong sum trusted or deleted,
no record, one that is not compared, one for files whose sum is known, no second connection
after a cut, one without end where nothing comes, a cut without a told size taken as the end, a
reply without size or with other bytes taken, a whole part fetched again, 416 and 404 as final,
other errors as 404, vocab.json under its own name.
"""

import hashlib
import json
import re
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data import download
from data.download import GPT2, HH, beside, measure, obtain

PROGRAM = download
BODY = bytes(i * i % 251 for i in range(200_003))
SUM = (len(BODY), hashlib.sha256(BODY).hexdigest())


class Handler(BaseHTTPRequestHandler):
    """Serves server.files {path: bytes or a status}; a connection carries server.cut bytes."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.seen.append((self.path, asked))
        if self.path.startswith("/moved/"):
            return self.answer(302, b"", Location=self.path.removeprefix("/moved"))
        body = server.files.get(self.path)
        if server.status or not isinstance(body, bytes):
            return self.answer(server.status or body or 404, b"no such thing")
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if start and start >= len(body):
            return self.answer(416, b"", Content_Range=f"bytes */{len(body)}")
        more = dict(Content_Range=f"bytes {start - server.shift}-{len(body) - 1}/{len(body)}")
        self.answer(206 if start else 200, body[start:], **(more if start else {}))

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        form = self.server.form if status < 300 else "length"
        if form == "length":
            self.send_header("Content-Length", str(len(body)))
        elif form == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = body[:self.server.cut if status < 300 else None]
        if form == "chunked":
            for i in range(0, len(sent), 7000):
                piece = sent[i:i + 7000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if sent == body:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(sent)
        self.close_connection = sent != body or form == "none"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.files, made.seen, made.cut, made.ranges, made.form = {"/f": BODY}, [], None, True, "length"
    made.status, made.shift = 0, 0
    made.handle_error = lambda *_: None       # a client that hangs up is no news for stderr
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, kwargs=dict(poll_interval=0.01))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def names(folder):
    return {p.name for p in folder.iterdir()}


# ---------------------------------------------------------------- the table

def test_the_table(data_dir):
    """The published sizes and sums, and two of the files themselves."""
    lines = (data_dir / "hh-rlhf/official.tsv").read_text().splitlines()[1:]
    told = {name: (int(size), digest) for name, size, digest in map(str.split, lines)}
    assert {name: known for name, known in HH.items() if known} == told and len(HH) == 8
    for name in ("helpful-base/test.jsonl.gz", "harmless-base/test.jsonl.gz"):
        assert measure(data_dir / "hh-rlhf" / name) == HH[name]


# ---------------------------------------------------------------- one file

def test_a_file_arrives_once(server, tmp_path):
    path = tmp_path / "new/folder/f"
    assert "fetched, size and sum are the published ones" in obtain(server.url + "/f", path, SUM)
    assert path.read_bytes() == BODY and names(path.parent) == {"f"}
    assert "is there" in obtain(server.url + "/f", path, SUM)
    assert server.seen == [("/f", None)]


@pytest.mark.parametrize("have, first", [(1, 1), (65_536, 65_536), (len(BODY) - 1, len(BODY) - 1)])
def test_a_part_is_continued(server, tmp_path, have, first):
    path = tmp_path / "f"
    beside(path).write_bytes(BODY[:have])
    obtain(server.url + "/f", path, SUM)
    assert server.seen == [("/f", f"bytes={first}-")]
    assert path.read_bytes() == BODY and names(tmp_path) == {"f"}


def test_a_whole_part_needs_no_connection(server, tmp_path):
    beside(tmp_path / "f").write_bytes(BODY)
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert server.seen == [] and (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize("known", [SUM, None])
def test_a_part_that_is_too_long_starts_anew(server, tmp_path, known):
    beside(tmp_path / "f").write_bytes(BODY + b"x")
    obtain(server.url + "/f", tmp_path / "f", known)
    assert [r for _, r in server.seen] == [f"bytes={len(BODY) + 1}-", None]
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize("form, step", [("length", 70_000), ("chunked", 65_536)])
def test_cut_connections(server, tmp_path, form, step):
    """Each brings 70,000 bytes at most (of chunks, whole blocks), from where the last was cut."""
    server.cut, server.form = 70_000, form
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert [r for _, r in server.seen] == [None, f"bytes={step}-", f"bytes={2 * step}-"]
    assert (tmp_path / "f").read_bytes() == BODY and names(tmp_path) >= {"f"}


def test_a_server_without_ranges(server, tmp_path):
    """It sends all from the start, and the part is no longer needed."""
    server.ranges = False
    beside(tmp_path / "f").write_bytes(b"?" * 500)
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize("form", ["length", "chunked"])
def test_nothing_comes(server, tmp_path, form):
    """One connection without a byte ends it; what is there stays, and serves the next time."""
    server.cut, server.form = 0, form
    beside(tmp_path / "f").write_bytes(BODY[:100])
    with pytest.raises(ValueError, match="/f: cut at byte 100 of .*the same command goes on"):
        obtain(server.url + "/f", tmp_path / "f")
    assert len(server.seen) == 1 and beside(tmp_path / "f").read_bytes() == BODY[:100]
    server.cut = None
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert server.seen[1:] == [("/f", "bytes=100-")]


def test_a_size_must_be_told(server, tmp_path):
    """A reply that ends with its connection could be a part."""
    server.form = "none"
    with pytest.raises(ValueError, match="tells no size"):
        obtain(server.url + "/f", tmp_path / "f")
    assert names(tmp_path) == set()


def test_other_bytes_than_asked_for(server, tmp_path):
    server.shift = 10
    beside(tmp_path / "f").write_bytes(BODY[:100])
    with pytest.raises(ValueError, match="other bytes than those from 100 on"):
        obtain(server.url + "/f", tmp_path / "f", SUM)


def test_a_redirection_keeps_the_range(server, tmp_path):
    beside(tmp_path / "f").write_bytes(BODY[:100])
    obtain(server.url + "/moved/f", tmp_path / "f", SUM)
    assert server.seen == [("/moved/f", "bytes=100-"), ("/f", "bytes=100-")]
    assert (tmp_path / "f").read_bytes() == BODY


def test_an_empty_file(server, tmp_path):
    server.files["/f"] = b""
    obtain(server.url + "/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b""


# ---------------------------------------------------------------- sizes and sums

@pytest.mark.parametrize("body", [BODY[:-1] + b"?", BODY[:-1], BODY + b"?", b"<html>"])
def test_a_wrong_file_is_not_kept(server, tmp_path, body):
    server.files["/f"] = body
    with pytest.raises(ValueError, match=f"/f: {len(body)} bytes, .* not kept"):
        obtain(server.url + "/f", tmp_path / "f", SUM)
    assert names(tmp_path) == set()


def test_a_wrong_part_is_not_kept(server, tmp_path):
    """The next call starts anew and succeeds."""
    beside(tmp_path / "f").write_bytes(b"?" * 100)
    with pytest.raises(ValueError, match="not kept, try again"):
        obtain(server.url + "/f", tmp_path / "f", SUM)
    assert names(tmp_path) == set()
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_wrong_file_that_is_there_is_set_aside(server, tmp_path, capsys):
    (tmp_path / "f").write_bytes(b"mine")
    obtain(server.url + "/f", tmp_path / "f", SUM)
    assert (tmp_path / "f").read_bytes() == BODY
    assert (tmp_path / "f.wrong").read_bytes() == b"mine"
    assert "f: size or sum are not the published ones: set aside" in capsys.readouterr().out


def test_an_unknown_sum_is_recorded_and_then_holds(server, tmp_path):
    path, record = tmp_path / "f", tmp_path / "recorded.json"
    said = obtain(server.url + "/f", path)
    assert "fetched, its size and sum are unknown: recorded" in said and str(record) in said
    assert json.loads(record.read_text()) == {"f": list(SUM)}
    assert f"is there, size and sum are those in {record}" in obtain(server.url + "/f", path)
    assert len(server.seen) == 1 and names(tmp_path) == {"f", "recorded.json"}
    path.unlink()
    server.files["/f"] = BODY[::-1]
    with pytest.raises(ValueError, match="not those in .*recorded.json"):
        obtain(server.url + "/f", path)
    assert names(tmp_path) == {"recorded.json"}
    server.files["/g"] = b"other"
    obtain(server.url + "/g", tmp_path / "g")
    assert json.loads(record.read_text()).keys() == {"f", "g"}
    record.unlink()                                   # a file without its record gets one
    assert "is there, its size and sum are unknown: recorded" in obtain("nowhere", tmp_path / "g")


@pytest.mark.parametrize("text", ["", "[1]", '{"f": 3}', '{"f": [1]}', '{"f": '])
def test_a_broken_record(tmp_path, text):
    (tmp_path / "recorded.json").write_text(text)
    with pytest.raises(ValueError, match="recorded.json: not readable; delete it"):
        obtain("nowhere", tmp_path / "f")


# ---------------------------------------------------------------- the program

def serve_hh(server, monkeypatch):
    """All 8 files, small, with their sums in the table but for the one that is unknown."""
    bodies = {name: name.encode() * 50 for name in HH}
    for name, body in bodies.items():
        server.files[f"/datasets/Anthropic/hh-rlhf/resolve/main/{name}"] = body
        known = (len(body), hashlib.sha256(body).hexdigest()) if HH[name] else None
        monkeypatch.setitem(HH, name, known)
    return bodies


def test_hh(server, tmp_path, program, monkeypatch):
    bodies = serve_hh(server, monkeypatch)
    out = tmp_path / "hh"
    code, said, err = program("--out", out, "--base", server.url + "/")
    assert (code, err) == (0, "") and said.count("fetched") == 8 and said.count("recorded") == 2
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.gz")} == bodies
    assert [str(p.relative_to(out)) for p in out.rglob("*.json")] == ["harmless-base/recorded.json"]
    code, said, err = program("--out", out, "--base", "http://127.0.0.1:9")
    assert (code, err) == (0, "") and said.count("is there") == 8


def test_some_folders(server, tmp_path, program, monkeypatch):
    serve_hh(server, monkeypatch)
    assert program("helpful-online", "harmless-base", "--out", tmp_path, "--base",
                   server.url)[0] == 0
    assert names(tmp_path) == {"helpful-online", "harmless-base"}


def serve_gpt2(server, name, weights="model.safetensors"):
    for theirs in (*GPT2.values(), weights):
        server.files[f"/openai-community/{name}/resolve/main/{theirs}"] = theirs.encode() * 9


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_gpt2(server, tmp_path, program, monkeypatch, weights):
    """Without an --out, in out/SIZE; the second kind of weights where there is no first."""
    monkeypatch.chdir(tmp_path)
    serve_gpt2(server, "gpt2-medium", weights)
    code, said, err = program("--gpt2", "gpt2-medium", "--base", server.url)
    assert (code, err) == (0, "") and said.count("recorded in") == 4
    folder = tmp_path / "out/gpt2-medium"
    assert names(folder) == {"config.json", "encoder.json", "vocab.bpe", weights, "recorded.json"}
    assert (folder / "encoder.json").read_bytes() == b"vocab.json" * 9
    assert (folder / "vocab.bpe").read_bytes() == b"merges.txt" * 9
    assert (folder / weights).read_bytes() == weights.encode() * 9
    code, said, err = program("--gpt2", "gpt2-medium", "--base", server.url)
    assert (code, err) == (0, "") and said.count("is there") == 4


INDEX = {"weight_map": {"a": "model-1.bin", "b": "model-2.bin", "c": "model-1.bin"}}


def serve_pythia(server, index=INDEX):
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model-1.bin": b"1",
             "model-2.bin": b"2",
             "pytorch_model.bin.index.json": json.dumps(index).encode()}
    for name, body in files.items():
        server.files[f"/EleutherAI/pythia-12b/resolve/main/{name}"] = body
    return set(files)


def test_pythia_in_parts(server, tmp_path, program, monkeypatch):
    """Each file that the index names, once; what is there already is not asked for again."""
    monkeypatch.chdir(tmp_path)
    wanted = serve_pythia(server)
    for said in ("recorded in", "is there"):
        code, out, err = program("--pythia", "pythia-12b", "--base", server.url)
        assert (code, err) == (0, "") and out.count(said) == 5
    folder = tmp_path / "out/pythia-12b"
    assert names(folder) == {*wanted, "recorded.json"}
    assert (folder / "model-2.bin").read_bytes() == b"2"


@pytest.mark.parametrize("index, words", [
    (dict(weight_map={}), "names no file"), ([], "no index"), ({}, "no index"),
    (dict(weight_map=dict(a="../model.bin")), "names '../model.bin', no file beside it"),
    (dict(weight_map=dict(a=".bin")), "no file beside it"),
    (dict(weight_map=dict(a=1)), "no index"),
    (dict(weight_map=[1]), "no index")])
def test_an_index_that_is_none(server, tmp_path, program, index, words):
    serve_pythia(server, index)
    argv = ["--pythia", "pythia-12b", "--base", server.url, "--out", tmp_path / "a"]
    code, _, err = program(*argv)
    assert code == 1 and words in err and err.count("\n") == 1 and "index.json" in err
    assert not list(tmp_path.rglob("model*.bin"))


def test_gpt2s_files_are_tiktokens(server, tmp_path, program, data_dir):
    """Saved under these names, tiktoken reads them."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    serve_gpt2(server, "gpt2")
    for ours, theirs in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        path = f"/openai-community/gpt2/resolve/main/{theirs}"
        server.files[path] = (data_dir / "gpt2-bpe" / ours).read_bytes()
    assert program("--gpt2", "--out", tmp_path / "g", "--base", server.url)[0] == 0
    ranks = data_gym_to_mergeable_bpe_ranks(str(tmp_path / "g/vocab.bpe"),
                                            str(tmp_path / "g/encoder.json"))
    assert len(ranks) == 50256 and ranks[b" the"] == 262


def test_errors_are_one_line(server, tmp_path, program, monkeypatch):
    serve_hh(server, monkeypatch)
    (tmp_path / "file").write_text("")
    web = ["helpful-base", "--base", server.url, "--out"]
    for status, argv, words in (
            (0, ["--base", "http://127.0.0.1:9", "--out", tmp_path / "a"], "no connection"),
            (0, ["--base", "nonsense", "--out", tmp_path / "a"], "nonsense"),
            (403, [*web, tmp_path / "a"], "the server says 403"),
            (503, ["--gpt2", "--base", server.url, "--out", tmp_path / "a"], "503"),
            (404, ["--gpt2", "--base", server.url, "--out", tmp_path / "a"], "404"),
            (0, [*web, tmp_path / "file"], "file"),
            (0, ["helpful-bass"], "no folder helpful-bass"),
            (0, ["--gpt2", "gpt3"], "gpt3"), (0, ["helpful-base", "--gpt2"], "one of"),
            (0, ["--gpt2", "--pythia", "pythia-1b"], "one of"), (0, ["--pythia"], "--pythia"),
            (0, ["--bogus"], "--bogus")):
        server.status = status
        code, out, err = program(*argv)
        assert code in (1, 2) and out == "" and words in err and err.count("\n") == 1, err
        assert err.startswith("error: ")
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "file"]


def test_only_a_missing_file_has_a_second_kind(server, tmp_path):
    serve_gpt2(server, "gpt2", "pytorch_model.bin")
    server.files.pop("/openai-community/gpt2/resolve/main/pytorch_model.bin")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        download.model("openai-community/gpt2", GPT2, tmp_path, server.url)
    assert [p.rsplit("/", 1)[1] for p, _ in server.seen][-4:] == list(download.WEIGHTS)
    serve_gpt2(server, "gpt2", "pytorch_model.bin")
    server.files["/openai-community/gpt2/resolve/main/model.safetensors"] = 503
    with pytest.raises(urllib.error.HTTPError, match="503"):
        download.model("openai-community/gpt2", GPT2, tmp_path, server.url)


def test_ctrl_c_keeps_the_part(server, tmp_path, program, monkeypatch):
    serve_hh(server, monkeypatch)
    server.cut = 10
    inner, calls = download.receive, []

    def receive(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return inner(*args)

    monkeypatch.setattr(download, "receive", receive)
    code, out, err = program("helpful-base", "--out", tmp_path, "--base", server.url)
    assert code == 1 and err == "interrupted: the same command goes on from here\n"
    assert [p.name for p in (tmp_path / "helpful-base").iterdir()] == [".test.jsonl.gz.part"]
