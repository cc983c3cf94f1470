"""eval.py: the list of claims, the runner, results.json, the pages; quick looks keep to themselves.

Proved alive by: a claim listed twice or in another order; a claim that fails ending the others, or
with status 0; results.json of a quick look in results/; figures drawn by a quick look; a claim
without records in the list; the word "inconclusive: ..." counted by its number; a quick base where
the run has one, a whole one where it has none.
"""

import json
from pathlib import Path

import pytest

import eval as runner
from claims import records, start
from common import UserError, parse_flags
from measures import mean_se


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


def claim(word=True, panels=(), fails=False):
    """A claim of a line a seed."""
    def measure(cfg):
        if fails:
            raise UserError("out/x: missing; run the x stage first")
        for unit in records.missing("own", cfg.seeds):
            records.append("own", unit)

    def judge(rows):
        """held: always."""
        return records.verdict(word, rows, f"{len(rows)} lines", panels)

    return records.Claim("says so", "HH 1", measure, judge, 5, "because", source="own",
                         paper="76%")


PANELS = [("t", "x", "y", {"a": {1: (0.5, 0.1, 3), 2: (0.6, 0.1, 3)}}),
          records.bars("u", "v", {"one": [1.0, 2.0], "two": [3.0, 4.0]})]


def test_claims_stand_in_the_papers_order():
    names = list(runner.CLAIMS)
    assert names == sorted(names, key=runner.place) and len(set(names)) == len(names)
    assert [n for n in names if n[0] in "HIK" and n[1:].isdigit()] == [
        *sorted(n for n in names if n[0] == "H"), *sorted(n for n in names if n[0] == "I"),
        *sorted(n for n in names if n[0] == "K")]
    assert runner.place("H9") < runner.place("H10") < runner.place("I01") < runner.place("A01")
    assert runner.place("K13") < runner.place("repair")


def test_each_claim_tells_its_rule_its_time_and_where_it_stands():
    for name, told in runner.CLAIMS.items():
        assert told.rule.startswith("held: ") and len(told.rule) > 30, name
        assert told.minutes > 0 and told.says and told.where, name


def test_without_names_they_are_listed(here, monkeypatch, capsys):
    monkeypatch.setattr(runner, "CLAIMS", {"X1": claim(), "X2": claim([
        records.Effect((0.5, 0.3), 0.2)]), "X3": records.Claim("no", "HH 2", None, None, 7)})
    for seed in range(3):
        records.append("own", dict(seed=seed))
    runner.main(runner.Config())
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:3]] == ["X1", "X2", "X3"]
    assert "held " in out[0] and "5 min   says so (HH 1)" in out[0] and "no record" in out[2]
    assert out[-1].startswith("1 held, 1 inconclusive, 1 no record;")


def test_names_are_words_without_a_flag():
    cfg = parse_flags(runner.Config, ["H12", "H20", "--seeds", "2"])
    assert cfg.claims == ("H12", "H20") and cfg.seeds == 2
    assert parse_flags(runner.Config, []).claims == ()
    assert runner.asked(runner.Config(claims=("H12", "H10", "H12"))) == ["H12", "H10"]
    assert runner.asked(runner.Config(all=True)) == list(runner.CLAIMS)
    with pytest.raises(UserError, match="H99: no claim; known are H01"):
        runner.asked(runner.Config(claims=("H12", "H99")))


def test_one_that_can_not_be_measured_ends_no_other(here, monkeypatch, capsys):
    monkeypatch.setattr(runner, "CLAIMS", {"X1": claim(fails=True), "X2": claim(panels=PANELS)})
    with pytest.raises(UserError, match="1 of 2 claims not measured: X1"):
        runner.main(runner.Config(all=True))
    out = capsys.readouterr().out
    assert "X1: not measured: out/x: missing" in out and "X2 held: 3 lines" in out
    assert Path("docs/claims/X2.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads(Path("results/results.json").read_text())
    assert told["X2"] == dict(verdict="held", measured="3 lines", says="says so", where="HH 1",
                              seeds=3, command="python eval.py X2", minutes=5)


@pytest.mark.parametrize("line, told", [
    ('{"seed": 1, "x"', "own.jsonl line 2: no JSON at column"),
    ("5", "own.jsonl line 2: a line must be a JSON object, not int"),
    ("", "own.jsonl line 2: no JSON"), ('{"x": 1}', "own.jsonl: no 'seed' in a record that X1")])
def test_a_broken_record_is_named(here, monkeypatch, line, told):
    monkeypatch.setattr(runner, "CLAIMS", {"X1": claim()})
    records.append("own", dict(seed=0))
    Path("results/own.jsonl").write_text(f'{{"seed": 0}}\n{line}\n')
    with pytest.raises(UserError, match=told):
        runner.main(runner.Config())


def test_a_claim_without_a_whole_seed_is_told(here, monkeypatch, capsys):
    own = claim()
    monkeypatch.setattr(runner, "CLAIMS", {"X1": records.Claim(
        own.says, own.where, own.measure, own.judge, 5, source="own", needs=("size", ("a",)))})
    with pytest.raises(UserError, match="1 of 1 claims not measured: X1"):
        runner.main(runner.Config(claims=("X1",)))
    assert "X1: not measured: no seed has all its records" in capsys.readouterr().out


@pytest.mark.parametrize("knobs, told", [
    (dict(seeds=0), "--seeds 0: at least 1"), (dict(all=True, readme=True), "one at a time"),
    (dict(claims=("H12",), report=True), "one at a time"),
    (dict(readme=True, report=True), "one at a time")])
def test_what_does_not_go_together_is_refused(here, knobs, told):
    with pytest.raises(UserError, match=told):
        runner.main(runner.Config(**knobs))


BEGIN, END = "<!-- x: begin -->", "<!-- x: end -->"


def test_markers_stand_once_and_in_order(here):
    path = Path("a.md")
    path.write_text(f"a{BEGIN}b{END}c")
    runner.pages.fill(path, dict(x="new"))
    assert path.read_text() == f"a{BEGIN}\nnew\n{END}c"
    for text in ("", BEGIN, END + BEGIN, BEGIN + BEGIN + END, BEGIN + END + END):
        path.write_text(text)
        with pytest.raises(UserError, match="a.md: needs the markers"):
            runner.pages.fill(path, dict(x="new"))
        assert path.read_text() == text


def test_records_that_can_not_be_judged_end_no_other_claim(here, monkeypatch, capsys):
    """As of a quick look: too little for a rule is told, not a traceback."""
    def judge(rows):
        """held: never."""
        return records.verdict(True, rows, str(mean_se([])))

    odd = records.Claim("odd", "HH 1", claim().measure, judge, 5, source="own")
    monkeypatch.setattr(runner, "CLAIMS", {"X1": odd, "X2": claim()})
    records.append("own", dict(seed=0))
    with pytest.raises(UserError, match="own.jsonl: X1 can't be judged by these records"):
        runner.main(runner.Config())
    with pytest.raises(UserError, match="1 of 2 claims not measured: X1"):
        runner.main(runner.Config(all=True))
    assert "X2 held" in capsys.readouterr().out
    assert list(json.loads(Path("results/results.json").read_text())) == ["X2"]


def test_a_failed_claim_tells_why(here, monkeypatch, capsys):
    monkeypatch.setattr(runner, "CLAIMS", {"X1": claim(word=False)})
    runner.main(runner.Config(claims=("X1",)))
    assert "X1 not held: 3 lines. Why: because" in capsys.readouterr().out
    assert not Path("docs").exists()                       # no panels, no figure


def test_a_quick_look_keeps_to_its_own_folder(here, monkeypatch):
    monkeypatch.setattr(runner, "CLAIMS", {"X1": claim(panels=PANELS)})
    runner.main(runner.Config(all=True, quick=True, run="out/r"))
    assert sorted(str(p) for p in Path(".").rglob("*") if p.is_file()) == [
        "out/r/quick/results/own.jsonl", "out/r/quick/results/results.json"]
    assert len(records.records("own")) == 1


def test_a_quick_look_makes_its_own_bases_where_the_run_has_none(here, monkeypatch):
    made = []
    monkeypatch.setattr(start.pretrain, "train", lambda cfg: made.append((cfg.out, cfg.steps)))
    quick, whole = (runner.Config(run="r", quick=q) for q in (True, False))
    Path("r/pretrain").mkdir(parents=True)
    Path("r/pretrain/ckpt.pt").touch()
    for cfg, size in ((quick, "toy"), (quick, "nano"), (whole, "toy"), (whole, "nano")):
        start.base(cfg, size)
    assert made == [("r/pretrain", 800), ("r/quick/pretrain-nano", 100), ("r/pretrain", 800),
                    ("r/pretrain-nano", 800)]
