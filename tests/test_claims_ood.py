"""claims/ood.py: verdicts on records made up to hold, to fail and to be unsure; what a unit asks.

Proved alive by: relative and plain swapped, errors ignored, the embeddings counted, seeds paired by
the order of the lines, toy above nano alone, the first layer alone for both ends, one distance for
both, the relative one for the best of both, toy alone shown ten.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_ood import TOK, tiny_model

from claims import ood, records
from common import save_checkpoint
from model import pack

SEEDS = range(3)
DEPTHS = {"nano": 2, "micro": 3, "toy": 4, "pm": 4}
PLAIN = {"nano": 0.60, "micro": 0.65, "toy": 0.70, "pm": 0.70}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [tmp_path / "results"])


def unsure(x):
    """Differences of three seeds that are x on average, 1.8 errors above 0."""
    return [0.05 * x, x, 1.95 * x]


def rows(seeds=SEEDS, change=None):
    """Records in which both claims hold; change(model, layer, seed) -> what is added, a dict."""
    out = []
    for seed in seeds:
        noise = 0.01 * (seed - 1)                          # of the seed's prompts: it cancels
        for model, depth in DEPTHS.items():
            layers = [dict(layer=0, plain=0.9, diagonal=0.9, relative=0.1, **{"10 shown": 0.1})]
            for k in range(1, depth + 1):
                middle = 0.05 * (k == 3)
                one = dict(layer=k, plain=PLAIN[model] + noise + middle,
                           relative=PLAIN[model] + 0.08 + noise + middle + 0.002 * seed,
                           diagonal=0.55, **{"1 shown": 0.6, "100 shown": 0.99,
                                             "10 shown": 0.90 + noise + 0.002 * seed})
                more = change(model, k, seed) if change else {}
                layers.append({key: v + more.get(key, 0) for key, v in one.items()})
            last = [dict(x, plain=1.0, relative=1.0) for x in layers]
            out.append(dict(seed=seed, model=model, earlier=layers, last=last))
    return out


def word(name, *args, **knobs):
    return ood.CLAIMS[name].judge(rows(*args, **knobs)).word


def at(model, layer, **more):
    """A change at one layer of a model, or at all (None); a list has a value a seed."""
    def change(m, k, seed):
        here = m == model and layer in (k, None)
        return {key.replace("_", " "): v[seed] if isinstance(v, list) else v
                for key, v in more.items()} if here else {}
    return change


def test_both_hold():
    assert word("H30") == word("H31") == "held"
    assert word("H30", range(2)) == "inconclusive: fewer than 3 seeds" == word("H31", range(2))
    told = ood.verdict_h30(rows()).told
    assert "above plain at 13 of 13 layers" in told and "layer 3 of 4" in told
    assert "toy 0.832 ± 0.007" in told and "in toy plain 0.750 ± 0.006, diagonal 0.550" in told
    assert "last request: relative nano 1.000" in told
    mixed = sorted(rows(), key=lambda r: r["seed"] * (-1 if r["model"] == "toy" else 1))
    assert ood.verdict_h30(mixed).word == ood.verdict_h31(mixed).word == "held"
    assert "nano +0.070 ± 0.000" in ood.verdict_h31(mixed).told     # seeds are paired by number
    told = ood.verdict_h31(rows()).told
    assert "relative at layer 3 0.832 ± 0.007" in told and "toy +0.070 ± 0.000" in told


def less(mean):
    """What makes relative less plain, 0.08 + 0.002 seed, be these three values."""
    return [x - 0.08 - 0.002 * seed for seed, x in enumerate(mean)]


@pytest.mark.parametrize("change", [
    at("nano", 1, relative=-0.2), at("pm", 4, relative=-0.09),
    at("micro", 2, relative=less([-0.001] * 3)),                    # one layer is not above plain,
    at("micro", 2, relative=less([0.009] * 3)),                     # or by too little to matter
    at("micro", None, plain=0.1, relative=0.1),                     # a smaller model is as good
    at("nano", 1, plain=0.2, relative=0.2),                         # at one of its layers
    at("toy", 3, plain=-0.06, relative=-0.06), at("toy", 1, plain=0.1, relative=0.1),
    at("toy", 4, plain=0.1, relative=0.1), at("toy", 4, plain=0.05, relative=0.05),
    at("toy", 1, plain=0.041, relative=0.041),                      # the middle is no better
    at("micro", 3, plain=0.041, relative=0.041)])                   # or toy is not
def test_h30_fails(change):
    assert word("H30", change=change) == "not held"


@pytest.mark.parametrize("change", [
    at("toy", 2, relative=less(unsure(0.02))),
    at("toy", 1, relative=[0.05 - x for x in unsure(0.02)]),
    at("micro", 3, relative=[0.05 - x for x in unsure(0.02)])])
def test_h30_waits(change):
    assert "seeds would tell" in word("H30", change=change)


def test_h30_holds_at_other_layers():
    assert word("H30", change=at("toy", 2, plain=0.1, relative=0.1)) == "held"
    assert word("H30", change=at("pm", None, plain=0.2, relative=0.2)) == "held"   # no base model


@pytest.mark.parametrize("change", [
    at("toy", 3, plain=0.5), at("toy", 1, plain=0.21), at("toy", 2, relative=0.2),   # either one
    at("toy", 3, **{"10_shown": -0.075}), at("nano", None, **{"10_shown": -0.075}),
    at("toy", 3, **{"10_shown": -0.061}), at("nano", None, **{"10_shown": -0.061})])
def test_h31_fails(change):
    assert word("H31", change=change) == "not held"


@pytest.mark.parametrize("model, layer", [("toy", 3), ("nano", None)])
def test_h31_waits(model, layer):
    change = at(model, layer, **{"10_shown": [x - 0.07 for x in unsure(0.02)]})
    assert "seeds would tell" in word("H31", change=change)


def test_h31_reads_toy_and_nano_alone():
    for change in (at("micro", None, **{"10_shown": -0.5}), at("pm", None, plain=0.5),
                   at("toy", 1, **{"10_shown": -0.5}), at("nano", 1, plain=0.3)):
        assert word("H31", change=change) == "held"


def test_figures():
    h30, h31 = ood.verdict_h30(rows()), ood.verdict_h31(rows())
    assert [title for title, *_ in h30.panels] == ["plain", "relative"]
    assert h30.panels[1][3]["toy relative"][0.75] == pytest.approx((0.832, 0.00693, 3), abs=1e-4)
    (_, _, _, curves), = h31.panels
    assert [*curves] == ["nano", "micro", "toy"] and [*curves["toy"]] == [1, 10, 100] and h31.log_x


def test_measure(here, monkeypatch, capsys):
    """A line a seed and model, of all layers and both settings; what is there is not done again."""
    for name in ("pretrain-nano", "pretrain-micro", "pretrain", "pm"):
        save_checkpoint_of(name)
    monkeypatch.setattr(ood, "base", lambda cfg, size: "run/pretrain" + (
        "" if size == "toy" else f"-{size}"))
    seen, count = [], ood.few
    monkeypatch.setattr(ood, "few", lambda cfg, n: (seen.append(n), count(cfg, 700))[1])
    cfg = SimpleNamespace(run="run", quick=False, seeds=1, steps=1, device="cpu")
    ood.measure(cfg)
    found = records.records("ood")
    assert [(r["seed"], r["model"]) for r in found] == [(0, m) for m in (*ood.SIZES, "pm")]
    for row in found:
        for setting in ("earlier", "last"):
            assert [x["layer"] for x in row[setting]] == [0, 1, 2]
            assert {"plain", "relative", "1 shown", "10 shown"} < row[setting][0].keys()
        assert row["earlier"] != row["last"]
    assert {*seen} == {9000} and "single" in capsys.readouterr().out
    ood.measure(cfg)
    assert records.records("ood") == found
    monkeypatch.setattr(ood, "few", lambda cfg, n: 300)
    ood.measure(SimpleNamespace(**{**vars(cfg), "seeds": 2}))
    one, two = (r["earlier"] for r in records.records("ood") if r["model"] == "toy")
    assert one != two
    claim = ood.CLAIMS["H30"]
    assert len(claim.rows("H30")) == 8 and claim.source == "ood" == ood.CLAIMS["H31"].source
    path = records.FOLDER[0] / "ood.jsonl"
    kept = [x for x in path.read_text().splitlines() if json.loads(x)["model"] != "micro"]
    path.write_text("\n".join(kept))
    assert claim.rows("H30") == []                                  # no seed is whole


def save_checkpoint_of(name):
    Path(f"run/{name}").mkdir(parents=True)
    model = tiny_model(len(name), layers=2, scalar=name == "pm")
    save_checkpoint(f"run/{name}/ckpt.pt", **pack(model, TOK))
