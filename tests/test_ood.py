"""Out-of-distribution prompts: distances by hand and by other libraries, exposure, thresholds, what
is read of a model, which prompts are kept, and the guard in the chat and at the page.

Proved alive by, in guard.py: the diagonal added, another divisor, float32 sums, Ledoit and Wolf's n
left out, constant features and singular covariances kept, one copy for N // M, a penalty of the
bias, ties cut, a share rounded down, sums for means, the token before the last, <|eot|> pooled,
weights out of the fingerprint, another model let in, history read or not, twice the threshold. In
ood.py: earlier harm on the wrong side, repeats kept, the threshold from the fit's prompts, these
tested, one split for all, classes swapped, all examples shown, another divisor, an HH row's later
turn, every guard with history. In model.py: layers after a norm. In the chat and at the page: a
draw used up by, history of, a wrong count of what was declined, the HHH prompt told to the guard,
one conversation of two; a declined message answered.
"""

import contextlib
import gzip
import io
import itertools
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from visits import stored

import feedback
import guard
import ood
import sample
from common import UserError, entry, load_checkpoint, save_checkpoint
from data import world
from data.tokenizer import join, train_bpe
from guard import (Guard, activations, distances, exposure, fingerprint, fit, fpr_at, ledoit_wolf,
                   load, placed, probability, standardized, threshold)
from measures import auroc
from model import GPT, GPTConfig, Rows, pack

TOK = train_bpe(["How can I poison the fox? What color is the fox? Where does it live? "] * 3, 320)
ROOT = Path(__file__).resolve().parent.parent
SQUARE = [[2, 1], [-2, -1], [1, 2], [-1, -2]]      # covariance [[2.5, 2], [2, 2.5]], det 2.25


def tiny_model(seed=0, n_ctx=200, layers=3, scalar=False):
    return GPT(GPTConfig(TOK.vocab, n_ctx, layers, 2, 16, scalar)).reset(seed).eval()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """a.pt and b.pt are language models, pm.pt is a preference model, short.pt has 24 positions."""
    folder = tmp_path_factory.mktemp("out")
    for seed, (name, n_ctx, scalar) in enumerate((("a", 200, False), ("b", 200, False),
                                                  ("pm", 200, True), ("short", 24, False))):
        save_checkpoint(folder / f"{name}.pt", **pack(tiny_model(seed, n_ctx, scalar=scalar), TOK))
    return folder


def cloud(n, d, seed=0):
    """Correlated points, far from 0 and of unlike scales."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(n, d)) @ rng.normal(size=(d, d))
    return mixed * np.logspace(-2, 2, d) + 50


# ---------------------------------------------------------------- distances

def test_distances_by_hand():
    fitted = fit(SQUARE, shrink=0.0)
    points = [[3, 0], [1, 1], [0, 0]]
    np.testing.assert_allclose(distances(fitted, points, "plain"), [10, 4 / 9, 0], atol=1e-12)
    np.testing.assert_allclose(distances(fitted, points), [10 - 3.6, 4 / 9 - 0.8, 0], atol=1e-12)
    np.testing.assert_allclose(distances(fitted, points, "diagonal"), [3.6, 0.8, 0])
    half = fit(SQUARE, shrink=0.5)                  # [[2.5, 1], [1, 2.5]], det 5.25
    np.testing.assert_allclose(distances(half, [[3, 0]], "plain"), [22.5 / 5.25])
    np.testing.assert_allclose(distances(fit(SQUARE, shrink=1.0), points), [0, 0, 0], atol=1e-12)
    moved = fit(np.add(SQUARE, [7, -3]), shrink=0.0)
    np.testing.assert_allclose(distances(moved, [[10, -3]]), [6.4])


def test_plain_is_scipys():
    spatial = pytest.importorskip("scipy.spatial.distance")
    x, asked = cloud(300, 7), cloud(20, 7, 1)
    inverse = np.linalg.inv(np.cov(x.T, ddof=0))
    wanted = [spatial.mahalanobis(a, x.mean(0), inverse) ** 2 for a in asked]
    np.testing.assert_allclose(distances(fit(x, 0.0), asked, "plain"), wanted, rtol=1e-8)


def test_ledoit_wolf_by_its_definition():
    """The mean squared distance of z_i z_i' from R, over n, and R's from I."""
    for n, d in ((5, 11), (40, 11), (3000, 3)):
        x = cloud(n, d)
        z = (x - x.mean(0)) / x.std(0)
        R = z.T @ z / n
        noise = np.mean([((np.outer(a, a) - R) ** 2).sum() for a in z]) / n
        assert ledoit_wolf(z) == pytest.approx(min(1, noise / ((R - np.eye(d)) ** 2).sum()))
    independent = np.array(list(itertools.product([-1, 1], repeat=3)), dtype=float)
    assert ledoit_wolf(independent) == 0                                # R is I already


def test_covariance_area_and_probe_are_sklearns():
    """Shrinkage and precision of standardized activations; areas with ties; the weighted probe."""
    covariance = pytest.importorskip("sklearn.covariance")
    linear, metrics = (pytest.importorskip(f"sklearn.{x}") for x in ("linear_model", "metrics"))
    for n, d in ((40, 11), (3000, 3)):
        x = cloud(n, d)
        z, fitted = (x - x.mean(0)) / x.std(0), fit(x)
        theirs = covariance.LedoitWolf(assume_centered=True).fit(z)
        assert fitted["shrink"] == pytest.approx(theirs.shrinkage_)
        np.testing.assert_allclose(fitted["precision"], theirs.precision_, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(distances(fitted, x, "plain"), theirs.mahalanobis(z), rtol=1e-6)
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 9, 200), rng.integers(0, 2, 200)
    assert auroc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))
    inside, outside = rng.normal(size=(60, 3)), rng.normal(size=(5, 3)) + 1
    weights = np.r_[np.ones(60), np.full(5, 12.0)] / 120
    probe = linear.LogisticRegression(C=1 / 0.01, tol=1e-10, max_iter=1000).fit(
        np.r_[inside, outside], [0] * 60 + [1] * 5, weights)
    np.testing.assert_allclose(exposure(inside, outside, 0.01),
                               np.r_[probe.intercept_, probe.coef_[0]], atol=1e-4)


def test_fewer_samples_than_dimensions_are_shrunk_and_it_is_told():
    x = cloud(9, 17)
    fitted = fit(x)
    assert 0 < fitted["shrink"] <= 1 and fitted["n"] == 9 and fitted["constant"] == 0
    assert np.linalg.eigvalsh(fitted["precision"])[-1] <= 1 / fitted["shrink"] + 1e-6
    assert np.isfinite(distances(fitted, cloud(5, 17, 1))).all()
    for singular in (x, np.repeat(cloud(99, 1), 2, 1)):    # and two features that are one
        with pytest.raises(ValueError, match="no inverse with --shrink 0: raise it"):
            fit(singular, shrink=0.0)


def test_a_constant_feature_is_left_out():
    x = cloud(50, 4)
    more = np.insert(np.insert(x, 2, 5.0, 1), 0, 3 + 1e-9 * np.arange(50), 1)   # and rounding
    fitted = fit(more)
    assert fitted["constant"] == 2 and fitted["varies"].tolist() == [0, 1, 1, 0, 1, 1]
    asked = np.insert(np.insert(x, 2, -99.0, 1), 0, 99.0, 1)
    np.testing.assert_allclose(distances(fitted, asked), distances(fit(x), x))


def test_what_has_no_covariance():
    for x, told in (([[1.0, 2.0]], "2 prompts or more, not 1"), (np.ones((5, 3)), "constant"),
                    ([[1, np.nan], [0, 1]], "not finite"), ([[1, np.inf], [0, 1]], "not finite"),
                    (np.ones(3), "not \\(3,\\)")):
        with pytest.raises(ValueError, match=told):
            fit(x)
    with pytest.raises(ValueError, match="not finite"):
        distances(fit(SQUARE), [[np.nan, 1]])


def test_sums_are_float64():
    x = cloud(60, 5).astype(np.float32) + np.float32(1000)
    fitted, wanted = fit(x), fit(x.astype(np.float64))
    np.testing.assert_array_equal(fitted["precision"], wanted["precision"])
    assert distances(fitted, x).dtype == np.float64


# ---------------------------------------------------------------- exposure

def test_exposure_is_the_regression_on_copies():
    """By another optimizer, on rows that are really copied: 50 // 7 = 7 of each."""
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(size=(50, 3)), rng.normal(size=(7, 3)) + [1, 0, 2]
    x = np.concatenate([inside, np.tile(outside, (7, 1))])
    y = np.repeat([0, 1], [50, 49])

    def loss(w):
        f = x @ w[1:] + w[0]
        return np.mean(np.log1p(np.exp(f)) - y * f) + 0.01 / 2 * (w[1:] ** 2).sum()

    found = exposure(inside, outside, ridge=0.01)
    wanted = optimize.minimize(loss, np.zeros(4), tol=1e-12).x
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    f = outside @ found[1:] + found[0]
    np.testing.assert_allclose(probability(found, outside), 1 / (1 + np.exp(-f)))
    np.testing.assert_array_equal(found, exposure(inside, outside, ridge=0.01))


def test_exposure_separable_and_not():
    rng = np.random.default_rng(1)
    inside = rng.normal(size=(200, 4))
    far = exposure(inside, rng.normal(size=(1, 4)) + 9, 1e-3)          # one example, no noise
    assert np.isfinite(far).all()
    assert probability(far, inside).max() < 0.5 < probability(far, np.full((1, 4), 9.0))[0]
    same = exposure(inside, inside, 1e-3)
    np.testing.assert_allclose(probability(same, inside), 0.5, atol=1e-6)
    for outside in (np.empty((0, 4)), np.ones((201, 4))):
        with pytest.raises(ValueError, match="none or too many"):
            exposure(inside, outside)


# ---------------------------------------------------------------- thresholds

def test_a_threshold_moves_whole_blocks_of_ties():
    for inside, fpr, at, declined in (
            ([1, 2, 2, 2, 3], 0.2, 2, 1), ([1, 2, 2, 2, 3], 0.4, 2, 1), ([1, 2, 2, 2, 3], 0, 3, 0),
            ([1, 2, 2, 2, 3], 0.8, 1, 4), ([5] * 20, 0.05, 5, 0), (range(20), 0.05, 18, 1),
            (range(100), 0.29, 70, 29)):
        for order in (list(inside), list(inside)[::-1]):
            assert threshold(order, fpr) == at
            assert sum(x > at for x in order) == declined


def test_a_share_that_is_almost_one_has_a_threshold():
    assert threshold([3.0, 1.0, 2.0], 1 - 1e-12) == 1.0


def test_false_positives_at_a_rate_of_true_ones():
    inside, outside = np.array([0.9, 0.5, 0.1]), [0.4, 0.9, 0.4, 0.9]
    assert fpr_at(inside, outside, 0.5) == pytest.approx(1 / 3)
    assert fpr_at(inside, outside, 0.75) == pytest.approx(2 / 3)       # both 0.4 or none
    assert fpr_at(inside, outside, 1.0) == pytest.approx(2 / 3)


def test_auroc_cases():
    assert auroc([0.5] * 4, [1, 0, 1, 0]) == 0.5
    for order in itertools.permutations(range(3)):
        assert auroc([[0.2, 0.2, 0.9][i] for i in order], [[0, 1, 1][i] for i in order]) == 0.75
    assert auroc([0.9, 0.9, 0.4, 0.7, 0.4, 0.1], [1, 0, 1, 1, 0, 0]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="both classes"):
        auroc([1, 2], [1, 1])


# ---------------------------------------------------------------- activations

TALKS = [[("human", "What color is the fox?")], [("human", "Where?")],
         [("human", "How can I poison the fox?"), ("assistant", "No."), ("human", "Why is it?")]]


@torch.no_grad()
def streams(model, ids):
    """The residual stream [layers + 1, T, C], block by block."""
    x = (model.wte(torch.tensor([ids])) + model.wpe(torch.arange(len(ids))))
    out = [x[0]]
    for block in model.h:
        x = block(x, Rows((1, len(ids))))
        out.append(x[0])
    return torch.stack(out)


@pytest.mark.parametrize("pool", ["last", "mean"])
@pytest.mark.parametrize("micro", [1, 2, 64])
def test_activations_are_those_of_the_layers(pool, micro):
    model = tiny_model()
    prompts = [placed(TOK, turns, 200, pool) for turns in TALKS]
    found = activations(model, prompts, TOK.pad, micro)
    assert found.shape == (4, 3, 16) and found.dtype == np.float64
    for i, turns in enumerate(TALKS):
        ids = TOK.render(turns, answer=True)
        own, words = streams(model, ids).double(), TOK.encode(turns[-1][1])
        wanted = own[:, -1] if pool == "last" else own[:, -2 - len(words):-2].mean(1)
        assert ids[-2 - len(words):-2] == words
        np.testing.assert_allclose(found[:, i], wanted, atol=1e-6)


def test_layers_are_collected_only_when_asked():
    model, ids = tiny_model(), torch.arange(12).view(2, 6)
    at = (torch.arange(2), torch.tensor([2, 5]))
    with torch.no_grad():
        layers = []
        hidden = model(ids, torch.tensor([3, 6]), at=at, layers=layers)
        assert len(layers) == 4 and torch.equal(model.ln_f(layers[-1]), hidden)
        assert torch.equal(model(ids, torch.tensor([3, 6]), at=at), hidden)


def test_where_a_prompt_is_pooled():
    ids, first, count = placed(TOK, TALKS[2], 200, "last")
    assert (first, count, ids[first]) == (len(ids) - 1, 1, TOK.assistant)
    ids, first, count = placed(TOK, TALKS[2], 200, "mean")
    assert TOK.decode(ids[first:first + count]) == "Why is it?" and ids[first - 1] == TOK.human
    assert placed(TOK, [("human", "")], 200, "mean")[2] == 1
    assert len(placed(TOK, TALKS[2], 20, "last")[0]) <= 20              # the oldest turns go
    assert placed(TOK, TALKS[2], 4, "last") is placed(TOK, TALKS[2], 4, "mean") is None


# ---------------------------------------------------------------- which prompts

def config(folder, *names, **knobs):
    ckpt = ",".join(str(folder / f"{name}.pt") for name in names or ("a",))
    return ood.Config(**{**dict(ckpt=ckpt, out=str(folder / "ood"), device="cpu", count=300,
                                shots="1,10", splits=2), **knobs})


def sources(*models):
    return {f"m{i}": (TOK, model) for i, model in enumerate(models or (tiny_model(),))}


def harmful(turns):
    return [world.request_of(turns[:j + 1]).harmful for j in range(0, len(turns), 2)]


@pytest.mark.parametrize("earlier", [False, True])
def test_prompts_of_the_world(tmp_path, capsys, earlier):
    cfg = config(tmp_path, earlier=earlier, count=400)
    sets = ood.prompts_of(cfg, sources())
    for side, found in sets.items():
        assert len({repr(x) for x in found}) == len(found) > 20
        for turns in found:
            asked = harmful(turns)
            assert not any(asked) if side == "inside" else (
                any(asked[:-1]) and not asked[-1] if earlier else asked[-1] and not any(asked[:-1]))
            assert not earlier or len(asked) > 1
    assert any(len(turns) > 1 for turns in sets["inside"])
    told = capsys.readouterr().out
    assert ("single" in told) == earlier and "mixed" in told and "400 prompts" in told
    again = ood.prompts_of(replace(cfg, seed=1), sources())
    assert again["inside"] != sets["inside"] and ood.prompts_of(cfg, sources()) == sets


def lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def ask(text):
    return [("human", text)]


def test_prompts_of_files(tmp_path, capsys):
    hh = {s: join([*ask("Where?"), ("assistant", "x"), *ask("More?"), ("assistant", s)])
          for s in ("chosen", "rejected")}
    inside = [hh, *({"prompt": join(ask(f"What {i}?"), answer=True)} for i in range(9)),
              {"prompt": join([*ask("What 3?"), ("assistant", "x"), *ask("y")], answer=True)},
              {"prompt": join(ask(" "), answer=True)},
              {"prompt": join(ask("poison " * 300), answer=True)}]
    outside = [{"prompt": join(ask(f"How {i}?"), answer=True)} for i in range(8)] + [hh]
    cfg = config(tmp_path, inside=lines(tmp_path / "in.jsonl.gz", inside), count=0,
                 outside=lines(tmp_path / "out.jsonl", outside))
    sets = ood.prompts_of(cfg, sources(tiny_model(), tiny_model(n_ctx=150)))
    assert sets["inside"] == [ask("Where?"), *(ask(f"What {i}?") for i in range(9))]
    assert sets["outside"] == [ask(f"How {i}?") for i in range(8)]
    told = capsys.readouterr().out
    assert "inside: 13 prompts, 1 empty, 10 kept, 1 repeated, 1 too_long" in told
    assert "outside: 9 prompts, 8 kept, 1 repeated" in told             # on both sides
    with pytest.raises(UserError, match="outside: 5 prompts are left, 8 or more"):
        ood.prompts_of(replace(cfg, inside=cfg.outside, outside=lines(
            tmp_path / "few.jsonl", inside[1:6])), sources())
    for rows, told in (([{"prompt": "x"}], "bad.jsonl line 1: field 'prompt'"), ([], "is empty"),
                       ([hh, {"chosen": 3}], "bad.jsonl line 2: field 'chosen'")):
        with pytest.raises(UserError, match=told):
            ood.prompts_of(replace(cfg, inside=lines(tmp_path / "bad.jsonl", rows)), sources())
    with pytest.raises(UserError, match="no.jsonl: No such file"):
        ood.prompts_of(replace(cfg, inside="no.jsonl"), sources())


def test_prompts_to_check(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('id,prompt,label\n1,"How, then?",safe\n2,Kill it,unsafe\n3,Kill a job,safe\n')
    assert ood.read_check(path) == {"safe": [ask("How, then?"), ask("Kill a job")],
                                    "unsafe": [ask("Kill it")]}
    for text, told in (("prompt,label\nx,good\n", "line 2: .*'label'"), ("a,b\nx,y\n", "'prompt'"),
                       ("prompt,label\n,safe\n", "line 2")):
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            ood.read_check(path)
    with pytest.raises(UserError, match="no.csv"):
        ood.read_check(tmp_path / "no.csv")


def test_a_check_that_has_nothing_or_a_mark_in_front(tmp_path):
    path = tmp_path / "c.csv"
    for text in ("", "prompt,label\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="c.csv: no prompt below"):
            ood.read_check(path)
    path.write_text("\ufeffprompt,label\nx,safe\n", encoding="utf-8")
    assert ood.read_check(path) == {"safe": [ask("x")]}


def test_the_real_files(data_dir):
    helpful = ood.read(data_dir / "hh-rlhf" / "helpful-base" / "test.jsonl.gz", 0)
    assert len(helpful) == 2354 and all(len(turns) == 1 for turns in helpful)
    checked = ood.read_check(data_dir / "xstest" / "xstest_prompts.csv")
    assert {side: len(found) for side, found in checked.items()} == dict(safe=250, unsafe=200)


def test_splits_share_nothing():
    cfg, sides = ood.Config(), dict(inside=range(41), outside=range(19))
    found = [ood.split(cfg, sides, number) for number in (0, 1, 0)]
    one, two, again = ([x.tolist() for x in rows.values()] for rows in found)
    assert one == again and one != two
    fit_, calibrate, test, expose, outside = one
    assert sorted(fit_ + calibrate + test) == list(range(41)) and len(fit_) == 20
    assert sorted(expose + outside) == list(range(19)) and len(calibrate) == 10
    assert ood.split(replace(cfg, seed=1), sides, 0)["fit"].tolist() != fit_


# ---------------------------------------------------------------- evaluation

def blobs(gap, n=400, seed=0):
    """Activations of one layer: inside, and outside `gap` away in the last direction."""
    rng = np.random.default_rng(seed)
    x = {side: rng.normal(size=(n, 3)) for side in ("inside", "outside", "safe")}
    x["outside"][:, 2] += gap
    return x


def test_measure():
    cfg = ood.Config(shrink=0.0, fpr=0.1)
    x = blobs(30)
    rows = ood.split(cfg, x, 0)
    for kind, shots in (("plain", 0), ("exposure", 5)):
        fitted = ood.detector(cfg, kind, x, rows, shots)
        found, scores = ood.measure(cfg, fitted, kind, x, rows)
        assert found["auroc"] == 1 and found["fpr95"] == 0 and found["declined_outside"] == 1
        own = guard.score(fitted, kind, x["inside"][rows["calibrate"]])
        assert (own > found["threshold"]).mean() == 0.1                # not of fit, nor of test
        assert found["declined_inside"] == (scores["inside"] > found["threshold"]).mean() < 0.25
        assert found["declined_safe"] == (scores["safe"] > found["threshold"]).mean()
        assert len(scores["inside"]) == 100 and len(scores["outside"]) == 200
    fitted = fit(x["inside"][rows["fit"]], 0.0)
    np.testing.assert_array_equal(fitted["mean"], ood.detector(cfg, "plain", x, rows)["mean"])
    turned = ood.measure(cfg, fitted, "plain", dict(x, outside=x["inside"] * 0.01), rows)[0]
    assert turned["auroc"] < 0.05


def test_over_splits():
    cfg = ood.Config(splits=3, shots="1,10,500")
    x = blobs(1.5)
    found, scores = ood.over_splits(cfg, x)
    assert list(found) == ["plain", "diagonal", "relative", "1 shown", "10 shown"]   # no 500
    each = []
    for number in range(3):
        rows = ood.split(cfg, x, number)
        fitted = ood.detector(cfg, "exposure", x, rows, 10)
        few = x["outside"][rows["expose"][:10]]
        z = standardized(fitted, x["inside"][rows["fit"]]), standardized(fitted, few)
        np.testing.assert_array_equal(fitted["weights"], exposure(*z, cfg.ridge))
        each.append(ood.measure(cfg, fitted, "exposure", x, rows)[0]["auroc"])
    assert found["10 shown"]["auroc"] == pytest.approx(np.mean(each), abs=1e-5)
    assert found["10 shown"]["auroc_sd"] == pytest.approx(np.std(each, ddof=1), abs=1e-5)
    assert found["10 shown"]["auroc"] > found["1 shown"]["auroc"]
    assert ood.over_splits(replace(cfg, splits=1), x)[0]["plain"]["auroc_sd"] == 0


def call(cfg, monkeypatch, capsys, *argv):
    """The command with `cfg`'s knobs: (exit status, output, last line of errors)."""
    flags = [f"--{k}={v}" for k, v in cfg.items()]
    monkeypatch.setattr(sys, "argv", ["ood.py", "--device=cpu", *flags, *argv])
    code, told = 0, ""
    try:
        entry(ood.main, ood.Config)
    except SystemExit as stop:
        code, told = 1, str(stop.code)
    shown = capsys.readouterr()
    return code, shown.out, told


def test_the_command(out, tmp_path, monkeypatch, capsys):
    cfg = dict(ckpt=f"{out / 'a.pt'},{out / 'pm.pt'}", count=300, splits=2, shots="1,10",
               out=tmp_path / "ood")
    code, text, _ = call(cfg, monkeypatch, capsys)
    assert code == 0 and text.count("AUROC by layer") == 2
    told = json.loads((tmp_path / "ood" / "ood.json").read_text())
    assert told["config"]["splits"] == 2 and [*told["checkpoints"]] == cfg["ckpt"].split(",")
    for rows in told["checkpoints"].values():
        assert [row["layer"] for row in rows] == [0, 1, 2, 3]
        for row in rows:
            assert {"plain", "relative", "1 shown", "10 shown"} < row.keys()
            assert f"{row['relative']['auroc']:.3f} ± {row['relative']['auroc_sd']:.3f}" in text
    assert (tmp_path / "ood" / "ood.png").read_bytes().startswith(b"\x89PNG")
    assert "is finished, skipped" in call(cfg, monkeypatch, capsys)[1]


def test_a_layer_that_is_broken_is_told(out, tmp_path, monkeypatch, capsys):
    model = tiny_model()
    torch.nn.init.constant_(model.h[1].mlp.c_proj.bias, np.nan)
    save_checkpoint(tmp_path / "nan.pt", **pack(model, TOK))
    cfg = dict(ckpt=tmp_path / "nan.pt", count=300, splits=1, shots="1", out=tmp_path / "o")
    code, text, _ = call(cfg, monkeypatch, capsys)
    assert code == 0 and "layer 2 is left out: an activation is not finite" in text
    _, _, told = call({**cfg, "out": tmp_path / "p"}, monkeypatch, capsys, "--layer=2")
    assert told == f"error: {tmp_path / 'nan.pt'} layer 2: an activation is not finite: nan or inf"


def test_only_the_embeddings_can_be_measured(out, tmp_path, monkeypatch, capsys):
    model = tiny_model()
    torch.nn.init.constant_(model.h[0].mlp.c_proj.bias, np.nan)
    save_checkpoint(tmp_path / "nan.pt", **pack(model, TOK))
    cfg = dict(ckpt=tmp_path / "nan.pt", count=300, splits=1, shots="1", out=tmp_path / "o")
    code, _, told = call(cfg, monkeypatch, capsys)
    assert (code, told) == (0, "") and (tmp_path / "o" / "ood.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_interrupted(out, tmp_path, monkeypatch, capsys, number):
    """Once is enough, nothing is half-written, and what is told is so."""
    def read(*_):
        signal.raise_signal(number)
        pytest.fail("it went on")
    monkeypatch.setattr(ood, "activations", read)
    monkeypatch.setattr(sys, "argv", ["ood.py"])
    with pytest.raises(SystemExit, match="130"):
        entry(lambda _: ood.main(config(out, out=str(tmp_path / "o"))), ood.Config,
              interrupted="it starts anew")
    assert capsys.readouterr().err.endswith("interrupted: it starts anew\n")
    assert not [*tmp_path.glob("o/ood.*")] and not (tmp_path / "o" / "ckpt.pt").exists()


@pytest.mark.parametrize("knobs, told", [
    (dict(layer=4), "a.pt has layers 0 \\(embeddings\\) to 3"), (dict(kind="x"), "--kind is one"),
    (dict(pool="x"), "--pool last or mean"), (dict(fpr=1), "--fpr"), (dict(shots="1,x"), "--shots"),
    (dict(shots="0"), "--shots"), (dict(splits=0), "--splits"), (dict(shrink=2), "--shrink"),
    (dict(shrink=float("nan")), "--shrink"), (dict(ridge=float("inf")), "--ridge"),
    (dict(count=-1), "--count from 0"), (dict(shots="\u00b2"), "--shots"),
    (dict(inside="x"), "--inside and --outside"), (dict(ckpt=","), "--ckpt"),
    (dict(layer=1, kind="exposure", shots="9999"), "--shots 9999: [0-9]+ outside prompts"),
    (dict(ckpt="no"), "no checkpoint here"), (dict(ckpt="a.pt,b.pt", layer=1), "just one")])
def test_what_is_refused(out, tmp_path, monkeypatch, capsys, knobs, told):
    monkeypatch.chdir(out)
    cfg = {**dict(ckpt="a.pt", count=300, out=tmp_path / "o"), **knobs}
    with pytest.raises(UserError, match=told):
        ood.main(ood.Config(**{**cfg, "out": str(cfg["out"]), "device": "cpu"}))


# ---------------------------------------------------------------- the guard

@pytest.fixture(scope="module")
def made(out, tmp_path_factory):
    """made(name, knobs) -> folder of a guard by layer 2 of a.pt."""
    root, known = tmp_path_factory.mktemp("guards"), {}

    def make(**knobs):
        key = repr(knobs)
        if key not in known:
            folder = known[key] = root / str(len(known))
            with contextlib.redirect_stdout(io.StringIO()):
                ood.main(config(out, **{**dict(out=str(folder), layer=2), **knobs}))
        return known[key]
    return make


@pytest.mark.parametrize("knobs", [{}, dict(kind="plain", pool="mean"),
                                   dict(kind="exposure", shots="20", fpr=0.2)])
def test_a_guard_scores_as_it_was_measured(made, out, knobs):
    folder = made(**knobs)
    cfg = config(out, layer=2, **knobs)
    it = load(folder, "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        sets = ood.prompts_of(cfg, {"a": (it.tok, it.model)})
    x = {s: v[2] for s, v in ood.activations_of(cfg, it.tok, it.model, sets).items()}
    rows = ood.split(cfg, x, 0)
    fitted = ood.detector(cfg, cfg.kind, x, rows, 20)
    wanted, scores = ood.measure(cfg, fitted, cfg.kind, x, rows)
    assert it.content["threshold"] == wanted["threshold"] and it.content["history"]
    for side, name in (("inside", "test"), ("outside", "outside")):
        for i, score in zip(rows[name][:9], scores[side]):
            assert it.score(sets[side][i]) == pytest.approx(score, rel=1e-4)
            told = it.refusal(sets[side][i])
            assert bool(told) == (score > wanted["threshold"])
            assert not told or f"score {score:.2g}"[:7] in told and (
                f"{wanted['threshold']:.4g}, which {cfg.fpr:.0%} of" in told)


def test_another_model_is_refused(made, out, tmp_path):
    content = load_checkpoint(made())
    own = load_checkpoint(out / "a.pt")
    other = load_checkpoint(out / "b.pt")
    assert content["guard"]["fingerprint"] == fingerprint(own) != fingerprint(other)
    assert fingerprint({**own, "tokenizer": own["tokenizer"] + "x"}) != fingerprint(own)
    moved = {**content["guard"], "ckpt": str(out / "b.pt")}
    save_checkpoint(tmp_path / "ckpt.pt", guard=moved)
    with pytest.raises(UserError, match="another model than .*b.pt"):
        load(tmp_path, "cpu")
    for path, told in ((out / "a.pt", "holds no guard"), (tmp_path / "no", "no checkpoint here")):
        with pytest.raises(UserError, match=told):
            load(path, "cpu")


def test_earlier_turns_are_read_where_the_guards_prompts_had_them(made):
    whole = load(made(), "cpu")
    alone = Guard("x", whole.tok, whole.model, {**whole.content, "history": False})
    assert alone.score(TALKS[2]) == alone.score(TALKS[2][-1:]) == whole.score(TALKS[2][-1:])
    assert whole.score(TALKS[2]) != alone.score(TALKS[2])
    long = [("human", "poison " * 300)]
    assert whole.refusal(long) == ("declined: too long for the guard, which reads 200 tokens: "
                                   "shorten it")


def test_a_guard_of_files_reads_messages_alone(out, tmp_path):
    paths = {s: lines(tmp_path / f"{s}.jsonl", [{"prompt": join(ask(f"{s} {i}?"), answer=True)}
                                                for i in range(40)]) for s in ("in", "out")}
    cfg = config(out, layer=1, out=str(tmp_path / "g"), inside=paths["in"], outside=paths["out"])
    ood.main(cfg)
    assert load(tmp_path / "g", "cpu").content["history"] is False


class Stub:
    """A guard that declines what has "poison" in any human turn that it is told."""

    def __init__(self):
        self.told = []

    def refusal(self, turns):
        self.told.append(turns)
        return "declined: no" if any("poison" in t for r, t in turns if r == "human") else ""


@pytest.fixture
def talk(out, monkeypatch, capsys):
    """talk(*flags, typed) -> (output, errors, prompts that models read, the stub)."""
    monkeypatch.chdir(out)
    monkeypatch.setenv("COLUMNS", "60")
    generate, prompts, stub = sample.generate, [], Stub()
    monkeypatch.setattr(sample, "generate", lambda model, rows, *a, **k: (
        prompts.extend(rows), generate(model, rows, *a, **k))[1])
    monkeypatch.setattr(sample, "load_guard", lambda path, device: stub)

    def run(*argv, typed=b""):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--device=cpu", "--new=5", *argv])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        entry(sample.main, sample.Config)
        return SimpleNamespace(**capsys.readouterr()._asdict(), prompts=prompts, stub=stub)
    return run


TYPED = b"Where?\nHow can I poison it?\nWhat color?\n"


def test_a_chat_goes_on_without_what_was_declined(talk):
    found = talk("--ckpt=a.pt", "--guard=g", typed=TYPED)
    assert len(found.out.splitlines()) >= 3 and "[declined: no]\n" in found.out
    assert "declined: 1 of 3 messages" in found.err
    assert len(found.prompts) == 2 and "poison" not in TOK.decode(found.prompts[1])
    assert [len(turns) for turns in found.stub.told] == [1, 3, 3]
    plain = talk("--ckpt=a.pt", typed=b"Where?\nWhat color?\n")        # and draws as if never asked
    assert plain.out == found.out.replace("[declined: no]\n", "") and "declined" not in plain.err


def test_one_shot_and_columns(talk):
    found = talk("--ckpt=a.pt", "--guard=g", "--prompt=poison")
    assert (found.out, found.err, found.prompts) == ("[declined: no]\n", "", [])
    found = talk("--ckpt=a.pt", "--compare=b.pt", "--guard=g", typed=TYPED)
    assert found.out.count("[declined: no]") == 1 and len(found.prompts) == 4
    assert len(found.stub.told) == 1 + 6                               # in both conversations


def test_the_hhh_prompt_is_not_the_persons(talk):
    big = tiny_model(n_ctx=640)
    save_checkpoint("big.pt", **pack(big, TOK))
    found = talk("--ckpt=big.pt", "--hhh", "--guard=g", typed=b"Where?\n")   # it has "poison" in it
    assert found.stub.told == [ask("Where?")] and len(found.prompts) == 1


def test_compared_models_are_declined_together(talk, monkeypatch):
    monkeypatch.setattr(Stub, "refusal", lambda self, turns: (
        self.told.append(turns), "declined: no" * (len(self.told) == 4))[1])
    found = talk("--ckpt=a.pt", "--compare=b.pt", "--guard=g", typed=b"Where?\nWhat?\n")
    assert "[declined: no]" in found.out and len(found.prompts) == 2


def panel_of(out, **knobs):
    return feedback.load(feedback.Config(policies=(str(out / "a.pt"), str(out / "b.pt")), new=5,
                                         device="cpu", **knobs))


def test_a_declined_message_at_the_page(site, out, made, monkeypatch):
    panel = panel_of(out, guard=str(made()))
    assert isinstance(panel.guard, Guard) and panel_of(out).guard is None
    panel.guard, calls, generate = Stub(), [], feedback.generate
    monkeypatch.setattr(feedback, "generate", lambda *a, **k: (calls.append(1),
                                                               generate(*a, **k))[1])
    one = site(panel)
    name = one.begin()
    status, reply = one.call("POST", "/api/ask", dict(talk=name, turn=0, text="poison"))
    assert (status, reply, calls) == (422, {"error": "declined: no"}, [])
    talk = one.talk(name)
    assert talk["turns"] == [] and talk["open"] is talk["pending"] is None
    assert one.ask(name, text="Where?")[-1]["done"]
    assert one.choose(name)[0] == 200
    assert one.call("POST", "/api/ask", dict(talk=name, turn=1, text="the poison"))[0] == 422
    assert [len(turns) for turns in panel.guard.told] == [1, 1, 3] and panel.declined == 2
    assert len(stored(site.folder)) == 1 and len(stored(site.folder, "talks")) == 3


def test_the_commands_together(tiny, nursery, tmp_path):
    """ood.py --layer, sample.py --guard and feedback.py --guard on the tiny base model."""
    base = tiny.whole("base")
    done = nursery.run(["ood.py", "--ckpt", base, "--layer", 2, "--count", 900, "--device", "cpu",
                        "--kind", "exposure", "--shots", 40, "--out", tmp_path / "g"])
    assert done.code == 0 and "exposure guard by layer 2" in done.out, done.err
    found = {}
    for text in ("What color is the fox?", "Help me poison the fox."):
        done = nursery.run(["sample.py", "--ckpt", base, "--guard", tmp_path / "g", "--prompt",
                            text, "--device", "cpu", "--new", 8])
        assert done.code == 0, done.err
        found[text] = done.out
    assert ["declined" in x for x in found.values()] == [False, True], found
    other = tmp_path / "other.pt"
    other.write_bytes((base / "ckpt.pt").read_bytes())
    content = load_checkpoint(tmp_path / "g")
    content["guard"]["fingerprint"] = "0" * 16
    save_checkpoint(tmp_path / "h.pt", **{k: v for k, v in content.items() if k != "format"})
    done = nursery.run(["feedback.py", "--policies", base, "--guard", tmp_path / "h.pt",
                        "--terminal", "--out", tmp_path / "f"])
    assert done.code == 1 and "another model" in done.last
    done = nursery.run(["feedback.py", "--policies", base, "--guard", tmp_path / "g", "--terminal",
                        "--device", "cpu", "--out", tmp_path / "f"])
    assert done.code == 0 and done.last.endswith("; messages declined: 0"), done.err
