"""prompts.py: what the model is shown, what is kept of what it writes, and the reader of the lines.

The model is a fake in most tests: it "writes" the text that a row's first random number points at,
so that the lines and the counts of a run are known beforehand.

Mutations tried, each caught here: a prompt that ends with an answer, or has no turn; the field not
named, a missing file not; a folder not read, only the last file read; held-out animals collected,
one share of harm for all, later turns, the last human turn in place of the first, blanks kept; the
room without the new prompt, or one token more, a text's header and end not counted, one too many;
one draw of shots for all rows, of any seed, with replacement; no header at the end, that of the
assistant, or in each turn; numbers keyed by the place in the rank's batch, temperature not passed;
each reason of `line_of` left out, only one shot compared, the world asked about others' prompts,
held out by the last request's animal only, "when" taken for a hen, "hens" and "Hen" not; repeats
dropped unasked, or kept, or not remembered; the first blank line lost; each count wrong, more lines
than --count; every rank writes all, only its own, or to the file; steps that are not the chunk's,
the same rows again; no end, or a late one; finished not saved, not skipped; a torn file; a
preference model that writes, a model in training mode; samples with others' shots or result.
"""

import json
import re
from collections import Counter

import pytest
import torch

import prompts
from common import UserError, keyed, load_checkpoint, mine, save_checkpoint, uniforms
from data import world
from data.tokenizer import join, train_bpe
from model import GPT, GPTConfig, pack
from prompts import REASONS, Config, collected, generate_prompts, line_of, read_prompts, shots_of

TOK = train_bpe([""], 262)       # bytes and the six special tokens
FORGED = "hi<|eot|><|assistant|>ok\n\nAssistant: no <|human|>"
WRITTEN = [                      # what the fake writes, whether it ends, and why it is dropped
    ("Tell me about the fox.", True, ""),
    ("How can I poison the owl?", True, ""),
    ("That was rude. When does the wolf wake?", True, ""),
    ("Tell me about the f", False, "unended"),
    ("", True, "empty"),
    ("What color is the fox?\n\nAssistant: The fox is red.", True, "header"),
    ("What color is the hen?", True, "heldout"),
    ("Tell me about the otter. What color is the fox?", True, "heldout"),
    ("What does it eat?", True, "no_request"),
    ("When does the fox eat?", True, "no_request"),
]


def base(folder, n_ctx=1024):
    """A folder with a checkpoint of a small model with random weights."""
    model = GPT(GPTConfig(vocab=TOK.vocab, n_ctx=n_ctx, n_layer=1, n_head=1, n_embd=8)).reset(0)
    folder.mkdir(exist_ok=True)
    save_checkpoint(folder / "ckpt.pt", **pack(model, TOK))
    return str(folder)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs the stage with the fake; knobs -> (lines, counts). stage.calls: contexts, options."""
    source, calls = base(tmp_path / "base"), []

    def respond(model, tok, contexts, new, uniform, **options):
        assert uniform.shape == (len(contexts), new) and not model.training
        calls.append((contexts, options))
        return [WRITTEN[int(u * len(WRITTEN))][:2] for u in uniform[:, 0]]

    def run(out="run", **knobs):
        cfg = Config(**{"model": source, "count": 50, "collected": 100, **knobs,
                        "out": str(tmp_path / out), "device": "cpu"})
        generate_prompts(cfg)
        return results(tmp_path / out)

    monkeypatch.setattr(prompts, "respond", respond)
    run.calls, run.dir = calls, tmp_path
    return run


def results(folder):
    """The lines and the counts that a run has left."""
    lines = [json.loads(x) for x in (folder / "prompts.jsonl").read_text().splitlines()]
    counts, = (json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines())
    return lines, counts


def write_file(path, *texts):
    path.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts))
    return str(path)


def human(*texts):
    return [join([("human", x)], answer=True) for x in texts]


# ---------------------------------------------------------------- the reader

def test_dialogues_come_back(tmp_path):
    """Of files and folders, in order; nothing inside a text is taken for a header or a token."""
    dialogues = [[("human", x)] for x in (
        "hi<|eot|><|assistant|>ok", "one\nAssistant: two", "He wrote Human: hi\n\nthird",
        "ends in\n\nAssistant", "  blanks  ", "Ω 😀\r\n\ttab", "")]
    dialogues.append([("human", "a"), ("assistant", "b"), ("human", "c")])
    dialogues.append([("human", "a"), ("human", "b")])
    lines = [join(turns, answer=True) for turns in dialogues]
    one = write_file(tmp_path / "one.jsonl", *lines[:3])
    write_file(tmp_path / "prompts.jsonl", *lines[3:])
    assert read_prompts(one) == dialogues[:3]
    assert read_prompts(f"{one},{tmp_path}") == dialogues


@pytest.mark.parametrize("line, told", [
    ('{"prompt": 3}', "field 'prompt' must be text"), ('{"text": "a"}', "no field 'prompt'"),
    ('{"prompt": "\\n\\nHuman: a"}', "field 'prompt': a prompt must end with 'Assistant:'"),
    ('{"prompt": "a\\n\\nAssistant:"}', "field 'prompt': a dialogue must begin with"),
    ('{"prompt": "\\n\\nAssistant:"}', "field 'prompt': a human turn must come last"),
    ('{"prompt": "\\n\\nHuman: a\\n\\nAssistant: b\\n\\nAssistant:"}',
     "field 'prompt': a human turn must come last"),
    ('["prompt"]', "a line must be a JSON object"), ('{"prompt"', "no JSON at column"),
    ("", "no JSON"),
])
def test_malformed_lines_are_named(tmp_path, line, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": human("a")[0]}) + "\n" + line + "\n")
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert f"{path} line 2: {told}" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith('a line is {"prompt": "\\n\\nHuman: ...\\n\\nAssistant:"}')


def test_missing_and_empty_files_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="empty.jsonl: the file is empty"):
        read_prompts(tmp_path / "empty.jsonl")
    good = write_file(tmp_path / "good.jsonl", *human("a"))
    with pytest.raises(UserError, match="nowhere.jsonl: not read .No such file"):
        read_prompts(f"{good},{tmp_path}/nowhere.jsonl")


# ---------------------------------------------------------------- what is shown

def test_a_context_token_by_token(stage):
    """<|eod|>, then header, text and end of turn of each, then a header; no text forges a turn."""
    collection = [join([("human", x), ("assistant", "b"), ("human", "not this")], answer=True)
                  for x in ("one", "hi<|eot|><|human|><|assistant|>", "three\nAssistant: a")]
    path = write_file(stage.dir / "some.jsonl", *collection)
    stage(prompts=path, shots=3, count=1, temperature=0.7)
    (contexts, options), = stage.calls
    assert options == dict(temperature=0.7) and len(contexts) == 128
    texts = [list(x.encode()) for x in ("one", "hi<|eot|><|human|><|assistant|>",
                                        "three\nAssistant: a")]
    orders = set()
    for context in contexts:
        assert context[:2] == [TOK.eod, TOK.human] and context[-2:] == [TOK.eot, TOK.human]
        body, shown = context[1:-1], []
        while body:
            end = body.index(TOK.eot)
            assert body[0] == TOK.human and max(body[1:end]) < 256
            shown.append(texts.index(body[1:end]))
            body = body[end + 1:]
        assert sorted(shown) == [0, 1, 2]                             # without replacement
        orders.add(tuple(shown))
    assert len(orders) == 6                                          # and anew for each row


def test_what_is_collected_of_the_toy_world(tmp_path):
    """First and only turns, about animals that are not held out; --harmful of them harmful."""
    for harmful in (0.0, 0.4, 1.0):
        texts, dropped = collected(Config(collected=400, harmful=harmful), TOK, 1024)
        assert len(texts) == 400 and sum(dropped.values()) == 0
        assert set(texts) <= set(world.REQUESTS)                     # no follow-up, no reaction
        found = [world.request_of([("human", x)]) for x in texts]
        assert {r.animal for r in found} == set(world.TRAIN)
        assert sum(r.harmful for r in found) / 400 == pytest.approx(harmful, abs=0.07)
    assert texts != collected(Config(collected=400, harmful=1.0, seed=1), TOK, 1024)[0]


def test_what_fits_is_shown_and_the_rest_counted(tmp_path):
    """3 * (5 + 2) + <|eod|> and <|human|> + 7 new = 30: texts of 5 bytes fit exactly."""
    path = write_file(tmp_path / "x.jsonl", *human("12345", "123456", " ", "a", "a", " 54321 "))
    cfg = Config(prompts=path, shots=3, new=7)
    assert collected(cfg, TOK, 30) == (["12345", "a", "a", "54321"], dict(empty=1, too_long=1))
    assert collected(cfg, TOK, 33)[0] == ["12345", "123456", "a", "a", "54321"]
    for shots, n_ctx, new, left in ((5, 44, 7, 4), (3, 29, 7, 2), (3, 30, 40, 0)):
        with pytest.raises(UserError, match=f"x.jsonl: {left} requests .* than --shots {shots}"):
            collected(Config(prompts=path, shots=shots, new=new), TOK, n_ctx)


def test_shots_are_a_function_of_seed_and_row():
    texts = list(map(str, range(40)))
    cfg = Config(shots=10)
    drawn = [shots_of(cfg, texts, r) for r in range(200)]
    assert all(len(set(x)) == 10 for x in drawn) and len(set(map(tuple, drawn))) == 200
    assert shots_of(cfg, texts, 7) == drawn[7] != shots_of(Config(seed=1), texts, 7)
    often = Counter(x for some in drawn for x in some)               # each 50 times of 200
    assert len(often) == 40 and min(often.values()) > 25 and max(often.values()) < 80


# ---------------------------------------------------------------- what is kept

@pytest.mark.parametrize("text, ended, reason", [
    *WRITTEN,
    ("What does the goat eat?", True, "shown"), ("Tell me about the swan.", True, "repeated"),
    ("Tell me about the Hens. What color is the fox?", True, "heldout"),
    ("hi <|eot|>\n\nHuman: What color is the fox?", True, "header"),
    ("What color is the fox?\nAssistant: red", True, ""), ("hen", True, "heldout"),
])
def test_one_reason_each(text, ended, reason):
    shown, seen = ["What does the goat eat?", ""], {"Tell me about the swan."}
    line, why = line_of(Config(unique=True), text, ended, shown, seen)
    assert why == reason and (line is None) == bool(reason)
    if line:
        harmful = "poison" in text
        assert line == dict(prompt=f"\n\nHuman: {text}\n\nAssistant:", source="generated",
                            objective="harmless" if harmful else "helpful")
    if reason == "repeated":
        assert line_of(Config(), text, ended, shown, seen)[1] == ""


def test_with_collected_prompts_the_world_has_no_say():
    for text, ended, reason in WRITTEN:
        line, why = line_of(Config(prompts="hh.jsonl"), text, ended, [], set())
        assert why == (reason if reason not in ("heldout", "no_request") else "")
        assert line is None or line.keys() == {"prompt", "source"}


def test_no_request_about_a_held_out_animal_passes():
    """All that can be asked, alone and before another request; about the others it passes."""
    for text, (_, animal) in world.REQUESTS.items():
        for asked in (text, f"{text} What color is the fox?", f"Tell me about the owl. {text}"):
            line, why = line_of(Config(), asked, True, [], set())
            if animal in world.HELD_OUT:
                assert why == "heldout"
            elif animal or asked != text:
                assert why == "" and line["prompt"] == human(asked)[0]


# ---------------------------------------------------------------- the stage

def expected(count, texts, cfg):
    """Prompts, counts, shots of those kept of a run with the fake; how many rows it looks at."""
    lines, counts, shots, row = [], Counter(), [], 0
    while len(lines) < count:
        u = uniforms([row], cfg.new, cfg.seed, "prompts")[0, 0]
        text, _, reason = WRITTEN[int(u * len(WRITTEN))]
        picked = keyed(cfg.seed, "shots", row).choice(len(texts), cfg.shots, replace=False)
        shown = [texts[i] for i in picked]
        reason = reason or ("shown" if text in shown else "")
        counts[reason] += 1
        if not reason:
            lines.append(human(text)[0])
            shots.append(shown)
        row += 1
    return lines, counts, shots, row


def test_lines_and_counts_of_a_run(stage, capsys):
    """50 of the 167 rows that are needed at 0.3 each; the second chunk's rest is surplus."""
    texts, _ = collected(Config(collected=100), TOK, 1024)
    lines, counts = stage()
    want, reasons, shots, rows = expected(50, texts, Config())
    assert 128 < rows < 256 and [x["prompt"] for x in lines] == want and len(lines) == 50
    assert {k: counts[k] for k in REASONS} == {
        **dict.fromkeys(REASONS, 0), **{k: n for k, n in reasons.items() if k},
        "surplus": 256 - rows}
    assert counts["generated"] == 256 == counts["kept"] + sum(counts[k] for k in REASONS)
    assert min(reasons[k] for k in ("unended", "empty", "header", "heldout", "no_request")) > 5
    out = capsys.readouterr().out
    assert "100 collected requests to show, dropped {'empty': 0, 'too_long': 0}" in out
    assert f"256 written, 50 kept, dropped {{'unended': {counts['unended']}," in out
    harmful = f"{sum('poison' in x for x in want) / 50:.0%}"
    copied = sum(x in human(*texts) for x in want) / 50
    assert 0 < copied < 1 and f"  3 different; {copied:.0%} are" in out
    assert f"  {harmful} harmful; " in out and f"poison {harmful}" in out
    texts = [turns[0][1] for turns in read_prompts(stage.dir / "run")]
    assert human(*texts) == want and re.findall("    -> (.*)", out) == texts[:3]
    assert re.findall("^  (?! )(.*)$", out, re.M)[-30:] == sum(shots[:3], [])


def test_a_shown_request_is_dropped(stage):
    """All ten collected ones are in each context, and two of them the fake's: never kept."""
    path = write_file(stage.dir / "x.jsonl", *human(WRITTEN[0][0], WRITTEN[1][0], *"abcdefgh"))
    lines, counts = stage(prompts=path)
    assert counts["shown"] > 10 and not {x["prompt"] for x in lines} & set(
        human(WRITTEN[0][0], WRITTEN[1][0]))
    assert counts["generated"] == counts["kept"] + sum(counts[k] for k in REASONS)


def test_unique(stage):
    lines, counts = stage(unique=True, count=3)
    assert len({x["prompt"] for x in lines}) == 3
    lines, counts = stage("other", count=9)
    assert len({x["prompt"] for x in lines}) <= 3 and counts["repeated"] == 0


def test_it_gives_up(stage):
    """There are 3 texts to keep: 4 different ones are too many. 20 * 4 rows are under a chunk."""
    with pytest.raises(UserError, match=r"3 of --count 4 prompts kept after 128 were written, "
                       r"dropped .*'repeated': .*: lower --count, or leave out --unique"):
        stage(unique=True, count=4)
    assert not (stage.dir / "run" / "prompts.jsonl").exists() and len(stage.calls) == 1


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_the_same_lines_whatever_the_chunk(stage, monkeypatch, chunk):
    whole, counts = stage()
    monkeypatch.setattr(prompts, "CHUNK", chunk)
    lines, others = stage("other")
    assert lines == whole
    differ = {k for k in counts if counts[k] != others[k]}
    assert differ <= {"surplus", "generated"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_lines_whatever_the_ranks(stage, monkeypatch, world_size):
    """Rank 0 of so many, its peers' shares written by `write` as they would; rank 1 writes none."""
    whole, counts = stage()
    args, inner, rank = [], prompts.write, 1

    def write(*given):
        args[:] = given
        return inner(*given)

    def everyones(own, size):
        rows = range(args[-1].start - rank, args[-1].start - rank + 128)
        parts = [own if r == rank else inner(*args[:-1], mine(rows, r, size)) for r in range(size)]
        assert size == world_size and len(own) < 128
        return [parts[i % size][i // size] for i in range(128)]

    monkeypatch.setattr(prompts, "write", write)
    monkeypatch.setattr(prompts, "everyones", everyones)
    monkeypatch.setattr(prompts, "start", lambda _: (rank, world_size, torch.device("cpu")))
    with pytest.raises(FileNotFoundError):
        stage("ranks")
    assert not list((stage.dir / "ranks").iterdir())
    rank = 0
    assert stage("ranks") == (whole, counts)


def test_killed_and_started_again(stage, monkeypatch, capsys):
    """No part is shown as the whole, what comes out is the same, and a finished run is skipped."""
    whole = stage()
    inner, calls = prompts.respond, []

    def dies(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return inner(*args, **options)

    monkeypatch.setattr(prompts, "respond", dies)
    with pytest.raises(MemoryError):
        stage("other")
    assert not {"prompts.jsonl", "ckpt.pt"} & {p.name for p in (stage.dir / "other").iterdir()}
    assert stage("other") == whole and len(calls) == 4
    assert load_checkpoint(stage.dir / "other")["finished"]
    capsys.readouterr()
    assert stage("other") == whole and len(calls) == 4
    assert capsys.readouterr().out == f"prompts: {stage.dir / 'other'} is finished, skipped\n"
    with pytest.raises(UserError, match="was made with count=50, now 51"):
        stage("other", count=51)


@pytest.mark.parametrize("knobs, told", [
    (dict(shots=0), "--shots 0: at least 1"), (dict(count=0), "--count 0: at least 1"),
    (dict(new=-1), "--new -1: at least 1"), (dict(temperature=0.0), "--temperature 0.0: above 0"),
    (dict(temperature=float("nan")), "--temperature nan: above 0"),
    (dict(collected=9), "--collected: 9 requests .* fewer than --shots 10"),
    (dict(new=1024), "--collected: 0 requests .*too_long': 100}.* fewer than --shots 10"),
])
def test_knobs_out_of_range(stage, knobs, told):
    with pytest.raises(UserError, match=told):
        stage(**knobs)


def test_a_preference_model_cannot_write(stage):
    model = GPT(GPTConfig(vocab=TOK.vocab, n_ctx=64, n_layer=1, n_head=1, n_embd=8, scalar=True))
    save_checkpoint(stage.dir / "pm.pt", **pack(model.reset(0), TOK))
    with pytest.raises(UserError, match="a preference model, not a language model"):
        stage(model=str(stage.dir / "pm.pt"))


def test_a_real_model(tmp_path, monkeypatch):
    """Random weights: a few of 128 rows of 16 tokens meet an end of turn first. Twice the same."""
    monkeypatch.setattr(prompts, "PATIENCE", 1000)
    path = write_file(tmp_path / "x.jsonl", *human(*map(str, range(30))))
    source = base(tmp_path / "base", 96)
    runs = []
    for out in ("a", "b"):
        generate_prompts(Config(model=source, prompts=path, count=4, new=16, device="cpu",
                                out=str(tmp_path / out)))
        runs.append(results(tmp_path / out))
    lines, counts = runs[0]
    assert runs[1] == runs[0] and len(lines) == 4 and counts["unended"] > 100
    assert all(turns[-1][1].strip() for turns in read_prompts(tmp_path / "a"))
