"""preference.py: the loss and what it recovers, the comparison files, one row for several answers.

Mutations tried, each caught here: naive log-sigmoid, loss backwards, hinge, ties right or wrong;
identical pair kept, a row that fits dropped, sum for maximum, drops not counted, sides swapped, no
end of turn; positions of the row, answers that see each other, score one early, scores left in the
order of length; U+2028 as the end of a line, line numbers from 0, prompt or types not checked, the
open header kept as a turn, an empty file accepted; one draw for both answers, unkeyed answers or
annotator, temperature, share of harm and held-out animals not used; mean of means, too few rows
accepted, the false fact first, a learning rate of 0. Soft labels turned round or not read; a
ranking's sum for its mean, pairs beyond a row's count, absent scores that are nan, weights without
their sum, doubles kept, pairs of both orders, demonstrations shifted away or the rejected ones in
their place, as many answers in all rows as in the first; biases of another answer's log-prob.
"""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from scipy.special import expit

import collect
import preference
from common import UserError, keyed, load_checkpoint, save_checkpoint
from data import world
from data.tokenizer import join, parse_prompt, train_bpe
from model import GPT, GPTConfig, pack, unpack
from preference import (
    accuracy,
    counts_of,
    encode_comparisons,
    over_pairs,
    preference_loss,
    read_comparisons,
    score_lines,
    score_pairs,
    score_rows,
    split_pairs,
    truth_rows,
)

TOK = train_bpe([str(world.document(0, i)) for i in range(60)], 320)


def gpt(seed=1, scalar=True, n_ctx=256):
    """A small random model with lively scores."""
    model = GPT(GPTConfig(TOK.vocab, n_ctx, 2, 2, 24, scalar))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.3 if name == "score_head.weight" else 0.12, generator=generator)
    return model


def row(prompt_length, *answer_lengths, seed=0):
    """A prompt and answers of given numbers of random tokens; answers end with <|eot|> <|eoc|>."""
    rng = keyed("row", seed, prompt_length, answer_lengths)
    prompt = [*rng.integers(0, 256, prompt_length - 1).tolist(), TOK.assistant]
    return prompt, [[*rng.integers(0, 256, n - 2).tolist(), TOK.eot, TOK.eoc]
                    for n in answer_lengths]


# ---------------------------------------------------------------- the loss

def test_loss_by_hand():
    """-log sigmoid of 2, 0, -2, and of +-200, where a naive log(sigmoid) is infinite."""
    chosen = torch.tensor([3.0, 1.0, -1.0, 100.0, -100.0], requires_grad=True)
    rejected = torch.tensor([1.0, 1.0, 1.0, -100.0, 100.0], requires_grad=True)
    loss = preference_loss(chosen, rejected)
    assert loss.tolist() == pytest.approx([0.1269, 0.6931, 2.1269, 0.0, 200.0], abs=5e-5)
    loss.sum().backward()
    want = [-0.1192, -0.5, -0.8808, 0.0, -1.0]                    # -sigmoid(rejected - chosen)
    assert chosen.grad.tolist() == pytest.approx(want, abs=5e-5)
    assert rejected.grad.tolist() == pytest.approx([-g for g in want], abs=5e-5)


def test_loss_against_finite_differences():
    chosen, rejected = (torch.from_numpy(keyed("loss", i).standard_normal(7) * 3).requires_grad_()
                        for i in range(2))
    assert torch.autograd.gradcheck(preference_loss, (chosen, rejected))


def test_only_the_difference_of_scores_counts():
    chosen, rejected = torch.tensor([0.3, -1.2]), torch.tensor([0.1, 0.4])
    moved = preference_loss(chosen + 5, rejected + 5)
    assert torch.allclose(moved, preference_loss(chosen, rejected), atol=1e-6)


def test_ties_count_one_half():
    right = accuracy(torch.tensor([2.0, 1.0, 1.0, -3.0]), torch.tensor([1.0, 1.0, 2.0, -3.0]))
    assert right.tolist() == [1.0, 0.5, 0.0, 0.5]


def test_known_utilities_come_back():
    """Bradley-Terry: annotators of temperature 0.6 judge 6 answers; scores are utility / 0.6."""
    utility = np.array([-1.2, -0.5, 0.0, 0.1, 0.8, 1.3])
    rng, N = keyed("choices"), 40_000
    a, b = rng.integers(0, 6, (2, N))
    a, b = a[a != b], b[a != b]
    p = np.array([[world.preference(x, y) for y in utility] for x in utility])
    first = rng.random(len(a)) < p[a, b]
    won, lost = (torch.from_numpy(np.where(first, *pair)) for pair in ((a, b), (b, a)))
    scores = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=100)

    def loss():
        optimizer.zero_grad()
        mean = preference_loss(scores[won], scores[lost]).mean()
        mean.backward()
        return mean

    optimizer.step(loss)
    found = (scores - scores.mean()).detach().numpy()
    assert np.abs(found - (utility - utility.mean()) / 0.6).max() < 0.08
    right = accuracy(scores[won], scores[lost]).mean().item()
    assert right == pytest.approx(np.maximum(p, 1 - p)[a, b].mean(), abs=0.01)  # best possible


def test_the_annotators_are_bradley_terry():
    """Simulated choices agree with sigmoid(difference / temperature), and `soft` says so."""
    turns = [("human", "What color is the fox?")]
    good, bad = "I do not know.", "You are a fool."
    request = world.request_of(turns)
    gap = world.gold(request, good)[0] - world.gold(request, bad)[0]
    for temperature in (0.3, 1.0):
        lines = [world.compare(world.keyed("a", i), turns, good, bad, temperature)
                 for i in range(1000)]
        share, p = np.mean([x["chosen"] == good for x in lines]), expit(gap / temperature)
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 1000)
        assert all(x["soft"] == pytest.approx(p if x["chosen"] == good else 1 - p) for x in lines)


def test_soft_labels_are_the_expected_loss():
    """p of choices one way, 1 - p the other; at the optimum the score is the log-odds of p."""
    chosen, rejected = torch.tensor([0.7, -200.0]), torch.tensor([-0.4, 100.0])
    for p in (0.0, 0.3, 1.0):
        want = p * preference_loss(chosen, rejected) + (1 - p) * preference_loss(rejected, chosen)
        assert torch.allclose(preference_loss(chosen, rejected, p), want)
    gap = torch.tensor([math.log(0.8 / 0.2)], requires_grad=True)
    preference_loss(gap, torch.zeros(1), 0.8).sum().backward()
    assert gap.grad.item() == pytest.approx(0, abs=1e-7)


# ---------------------------------------------------------------- rankings

def test_the_pairs_of_a_ranking_by_hand():
    """Scores 2, 1, 0: three pairs, differences 1, 2, 1. Of the second row only two are real."""
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, math.nan]], requires_grad=True)
    counts = torch.tensor([3, 2])
    loss = over_pairs(preference_loss, scores, counts)
    want = [(2 * 0.31326 + 0.12693) / 3, 1.31326]                 # log(1 + e^-d)
    assert loss.tolist() == pytest.approx(want, abs=1e-5)
    loss.sum().backward()
    assert torch.isfinite(scores.grad[:, :2]).all() and scores.grad[1, 2] == 0
    assert over_pairs(accuracy, scores.detach(), counts).tolist() == [1.0, 0.0]
    ties = torch.zeros(1, 4)
    assert over_pairs(accuracy, ties, torch.tensor([4])).item() == 0.5
    two = torch.tensor([[0.3, 1.0]])
    assert over_pairs(preference_loss, two, torch.tensor([2])) == preference_loss(*two.T)


def test_a_ranking_has_the_gradient_of_its_pairs():
    """One row [prompt, r1 .. rK] against K(K-1)/2 rows of two answers, their mean."""
    model, grads = gpt(4), []
    (prompt, answers), (short, two) = row(5, 4, 7, 3, 6), row(9, 5, 4)
    for rows in ([(prompt, answers), (short, two)], None):
        model.zero_grad()
        if rows:
            loss = over_pairs(preference_loss, score_rows(model, TOK, rows), counts_of(rows)).sum()
        else:
            pairs, lines = split_pairs([(prompt, answers)], [dict(a=1)])
            assert len(pairs) == len(lines) == 6
            loss = sum(preference_loss(*score_rows(model, TOK, [p])[0]) for p in pairs) / 6
            loss = loss + preference_loss(*score_rows(model, TOK, [(short, two)])[0])
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()
                                if p.grad is not None]))
    assert grads[0].norm() > 0.1 and torch.allclose(*grads, rtol=0, atol=1e-5 * grads[0].norm())


def test_rankings_keep_their_order_and_lose_their_doubles():
    ranking = dict(prompt=[("human", "hi")], responses=["b", "a", "b", "c"])
    same = dict(prompt=[("human", "hi")], responses=["x", "x"])
    rows, kept, dropped = encode_comparisons(TOK, [ranking, same], 99)
    assert [TOK.decode(a) for a in rows[0][1]] == ["b", "a", "c"] and kept == [ranking]
    assert dropped == dict(identical=1, too_long=0)
    kept, scores, _ = score_lines(gpt(), TOK, [ranking, line("x", "y")])
    assert [len(s) for s in scores] == [3, 2]
    assert scores[1] == pytest.approx(
        score_rows(gpt(), TOK, encode_comparisons(TOK, [line("x", "y")], 99)[0])[0].tolist(),
        abs=1e-5)


# ---------------------------------------------------------------- several answers in a row

def test_each_answer_scores_as_it_would_alone():
    """K = 2 and InstructGPT's K = 4 answers in one row, against plain rows prompt + answer."""
    model = gpt()
    for rows in ([row(5, 3, 9), row(11, 7, 2)], [row(5, 3, 9, 4, 2), row(2, 6, 5, 8, 3)]):
        scores = score_rows(model, TOK, rows)
        assert scores.shape == (2, len(rows[0][1])) and scores.std() > 0.1
        for b, (prompt, answers) in enumerate(rows):
            for k, answer in enumerate(answers):
                alone = model.score(model(torch.tensor([prompt + answer])))[0, -1]
                assert scores[b, k].item() == pytest.approx(alone.item(), abs=1e-5)


def test_an_answer_is_blind_to_its_rivals():
    """Its score stays when the others change, move, or leave."""
    model, (prompt, (a, b, c)) = gpt(), row(7, 4, 6, 5)
    one, two, three = score_rows(model, TOK, [(prompt, [a, b, c])])[0].tolist()
    again = score_rows(model, TOK, [(prompt, [c, a])])[0].tolist()
    assert again == pytest.approx([three, one], abs=1e-5)
    assert score_rows(model, TOK, [(prompt, [b])])[0].tolist() == pytest.approx([two], abs=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 3, 64])
def test_scores_come_in_the_order_given_for_any_batch(micro):
    model = gpt()
    rows = [row(p, *a, seed=i) for i, (p, a) in enumerate([(9, (3, 4)), (2, (2, 11)), (30, (5, 5)),
                                                          (4, (8, 2)), (17, (6, 21))])]
    single = torch.cat([score_rows(model, TOK, [r]).detach() for r in rows])
    assert torch.allclose(score_pairs(model, TOK, rows, micro), single, atol=1e-5)


def test_neighbours_and_padding_do_not_change_a_score():
    """Alone, beside 3 and beside 100 more tokens."""
    model, mine = gpt(), row(6, 4, 5)
    alone = score_rows(model, TOK, [mine])[0]
    for longer in (row(6, 5, 7), row(60, 25, 30)):
        assert torch.allclose(score_rows(model, TOK, [longer, mine])[1], alone, atol=1e-5)


def test_the_pad_id_inside_an_answer_is_a_token_like_others():
    """The score is read at the last token by length, not before the first pad."""
    model, (prompt, (a, b)) = gpt(), row(5, 6, 4)
    a = [a[0], TOK.pad, TOK.eoc, *a[3:]]
    score = score_rows(model, TOK, [(prompt, [a, b])])[0, 0]
    alone = model.score(model(torch.tensor([prompt + a])))[0, -1]
    assert score.item() == pytest.approx(alone.item(), abs=1e-5)


def test_gradients_are_those_of_separate_rows():
    """What a comparison teaches does not depend on sharing the prompt."""
    model, rows = gpt(), [row(5, 3, 9), row(11, 7, 2)]

    def gradient(scores):
        model.zero_grad()
        preference_loss(*scores.unbind(1)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    shared = gradient(score_rows(model, TOK, rows))
    separate = gradient(torch.stack([
        torch.stack([model.score(model(torch.tensor([prompt + a])))[0, -1] for a in answers])
        for prompt, answers in rows]))
    assert shared.norm() > 0.1 and torch.allclose(shared, separate, atol=1e-5)


# ---------------------------------------------------------------- files of comparisons

PROMPT = "\n\nHuman: hi\n\nAssistant:"


def write(path, *lines):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_comparisons_are_read_from_a_file_or_its_folder(tmp_path):
    talk = "\n\nHuman: a\n\nb\n\nAssistant: c\n\nHuman: d\n\nAssistant:"
    more = dict(chosen="é\u2028\x85 x", rejected="\n\nAssistant: y", tranche="rs")
    path = write(tmp_path / "comparisons.jsonl", dict(prompt=talk, chosen="x", rejected=""),
                 dict(prompt=PROMPT, **more))
    first, second = read_comparisons(path)
    assert read_comparisons(tmp_path) == [first, second]
    assert first["prompt"] == [("human", "a\n\nb"), ("assistant", "c"), ("human", "d")]
    assert second == dict(prompt=[("human", "hi")], **more)


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    """JSON leaves U+2028, U+0085 and others as they are; only a newline ends a line."""
    text = "one\u2028two\u2029three\x85four"
    line = json.dumps(dict(prompt=PROMPT, chosen=text, rejected="x"), ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    assert [x["chosen"] for x in read_comparisons(tmp_path / "a.jsonl")] == [text]


GOOD = dict(prompt=PROMPT, chosen="x", rejected="y")


@pytest.mark.parametrize("bad, said", [
    ("{not json", "no JSON at column 2"),
    ("", "no JSON at column 1"),
    ("[1]", "must be a JSON object, not list"),
    ("7", "must be a JSON object, not int"),
    (dict(prompt=PROMPT, chosen="x"), "no field 'rejected'"),
    (dict(chosen="x", rejected="y"), "no field 'prompt'"),
    ({**GOOD, "chosen": None}, "field 'chosen' must be text, not NoneType"),
    ({**GOOD, "rejected": ["y"]}, "field 'rejected' must be text, not list"),
    (dict(prompt=PROMPT, responses=["x"]), "'responses' is not a list of two texts or more"),
    (dict(prompt=PROMPT, responses="xy"), "'responses' is not a list of two texts or more"),
    ({**GOOD, "soft": 1.5}, "field 'soft' is not a probability"),
    ({**GOOD, "prompt": "hi"}, "must end with"),
    ({**GOOD, "prompt": "\n\nHuman: hi"}, "must end with 'Assistant:' after a blank line"),
    ({**GOOD, "prompt": PROMPT + " so"}, "must end with 'Assistant:' after a blank line"),
])
def test_a_bad_line_is_named_with_its_file_and_field(tmp_path, bad, said):
    path = write(tmp_path / "some.jsonl", GOOD, bad, GOOD)
    with pytest.raises(UserError) as caught:
        read_comparisons(path)
    message = str(caught.value)
    assert f"{path} line 2: " in message and said in message and "\n" not in message


def test_bad_lines_are_left_out_only_when_told(tmp_path, capsys):
    """Invalid UTF-8 and a torn line among good ones; a cut archive keeps what is before the cut."""
    path = write(tmp_path / "some.jsonl", GOOD, "{torn", GOOD)
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="line 2"):
        read_comparisons(path)
    assert len(read_comparisons(path, skip_bad=True)) == 2
    assert "2 malformed of 4 lines left out" in capsys.readouterr().out
    whole = gzip.compress("".join(json.dumps({**GOOD, "chosen": str(i)}) + "\n"
                                  for i in range(5000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UserError, match="the archive is cut or damaged here"):
        read_comparisons(tmp_path / "cut.jsonl.gz")
    some = read_comparisons(f"{tmp_path / 'cut.jsonl.gz'},{path}", skip_bad=True)
    assert 1000 < len(some) < 5000 and some[0]["chosen"] == "0"


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no.jsonl: no such file"):
        read_comparisons(tmp_path / "no.jsonl")
    with pytest.raises(UserError, match="comparisons.jsonl: no such file"):
        read_comparisons(tmp_path)
    with pytest.raises(UserError, match="empty.jsonl: the file is empty"):
        read_comparisons(write(tmp_path / "empty.jsonl"))


# ---------------------------------------------------------------- rows of tokens

def line(chosen, rejected, question="hi"):
    return dict(prompt=[("human", question)], chosen=chosen, rejected=rejected)


def test_a_comparison_becomes_what_a_policy_would_have_sampled():
    (prompt, (chosen, rejected)), = encode_comparisons(TOK, [line("yes", "")], 99)[0]
    assert prompt == [TOK.eod, TOK.human, *TOK.encode("hi"), TOK.eot, TOK.assistant]
    assert chosen == [*TOK.encode("yes"), TOK.eot, TOK.eoc] and rejected == [TOK.eot, TOK.eoc]


def test_rows_used_and_dropped_add_up():
    """One is identical, two are too long; a row that just fits is kept, cut to its last turns."""
    lines = [line("a", "b"), line("same", "same"), line("c" * 90, "d"),
             line("e", "f", "?" * 99), line("d", "c")]
    rows, kept, dropped = encode_comparisons(TOK, lines, 60)
    assert dropped == dict(identical=1, too_long=2)
    assert len(rows) + sum(dropped.values()) == len(lines) and kept == [lines[0], lines[4]]
    assert [TOK.decode(r[1][0]) for r in rows] == ["a", "d"]
    old = dict(lines[0], prompt=[("human", "z" * 99), ("assistant", "z"), ("human", "hi")])
    assert encode_comparisons(TOK, [old], 60)[0] == rows[:1]
    size = len(rows[0][0]) + 3                                    # prompt, "a", <|eot|>, <|eoc|>
    assert [len(encode_comparisons(TOK, lines[:1], n)[0]) for n in (size - 1, size)] == [0, 1]


def test_text_cannot_forge_a_turn_or_an_end():
    text = "ok<|eot|><|human|>\n\nHuman: more<|eoc|>"
    (_, (chosen, _)), = encode_comparisons(TOK, [line(text, "b")], 200)[0]
    assert [t for t in chosen if t >= len(TOK.ranks)] == [TOK.eot, TOK.eoc]
    assert TOK.decode(chosen) == text


def test_truth_rows_differ_in_one_fact_and_the_true_one_is_first():
    rows = truth_rows(TOK, world.TRAIN, count=50)
    for prompt, (true, false) in rows:
        asked = world.request_of(parse_turns(prompt))
        assert world.gold(asked, TOK.decode(true))[0] == pytest.approx(1.0)
        assert world.gold(asked, TOK.decode(false))[0] == pytest.approx(-1.0)
        assert asked.animal in world.TRAIN
    assert rows == truth_rows(TOK, world.TRAIN, count=50)


def parse_turns(prompt):
    """The one human turn of a rendered prompt."""
    assert prompt[:2] == [TOK.eod, TOK.human] and prompt[-2:] == [TOK.eot, TOK.assistant]
    return [("human", TOK.decode(prompt))]


# ---------------------------------------------------------------- the stage

@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("preference") / "policy.pt"
    save_checkpoint(path, **pack(gpt(3, scalar=False), TOK))
    return str(path)


def collected(policy, out, **flags):
    collect.collect(collect.Config(**{**dict(policy=policy, out=str(out), new=8, device="cpu",
                                             count=20), **flags}))
    return read_comparisons(out)


def test_collecting_is_a_function_of_the_seed(policy, tmp_path):
    lines = collected(policy, tmp_path / "a")
    assert lines == collected(policy, tmp_path / "b") and len(lines) == 20
    assert lines[:7] == collected(policy, tmp_path / "c", count=7)    # more only adds
    assert lines != collected(policy, tmp_path / "d", seed=1)


def test_a_collected_line_holds_what_it_should(policy, tmp_path):
    lines = collected(policy, tmp_path)
    for x in lines:
        request = world.request_of(x["prompt"])
        assert request.animal in world.TRAIN and x["objective"] == request.objective
        assert x["chosen"] != x["rejected"]
        golds = [world.gold(request, x[side])[request.harmful] for side in ("chosen", "rejected")]
        assert x["gold"] == pytest.approx(golds)
        assert x["soft"] == pytest.approx(expit((golds[0] - golds[1]) / 0.6))
    assert {x["objective"] for x in lines} == {"helpful", "harmless"}
    raw = [json.loads(t) for t in (tmp_path / "comparisons.jsonl").read_text().splitlines()]
    for x in raw:
        assert join(parse_prompt(x["prompt"]), answer=True) == x["prompt"]


def test_held_out_animals_are_asked_about_only_when_told(policy, tmp_path):
    """The request itself names one of the five; another seed of text lies under it."""
    lines = collected(policy, tmp_path, heldout=True)
    assert {world.request_of(x["prompt"]).animal for x in lines} <= set(world.HELD_OUT)


def test_without_noise_the_better_answer_is_chosen(policy, tmp_path):
    assert all(x["gold"][0] >= x["gold"][1] for x in collected(policy, tmp_path, temperature=0.0))


def test_a_policy_with_one_answer_is_refused(policy, tmp_path, monkeypatch):
    """Its two answers are always the same text, so no number of prompts would do."""
    monkeypatch.setattr(collect, "answer_and_judge", lambda cfg, tok, *_: [None] * 128)
    with pytest.raises(UserError, match="all answers to each of .* the same text"):
        collected(policy, tmp_path)


def trained(policy, out, data="", **flags):
    cfg = preference.Config(init=policy, out=str(out), data=str(data), device="cpu",
                            **{**dict(pairs=16, batch=8, micro=8, lr=1e-3, warmup=0), **flags})
    preference.train(cfg)
    lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "loss" in x], load_checkpoint(out)


def test_the_first_loss_is_log_2_and_micro_batches_do_not_matter(policy, tmp_path, monkeypatch):
    """All scores of a fresh head are 0: accuracy 1/2. Gradients agree for any micro-batch."""
    seen, inner = [], preference.update

    def update(model, *rest):
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return inner(model, *rest)

    monkeypatch.setattr(preference, "update", update)
    monkeypatch.setattr(preference, "truth_rows", lambda tok, animals: [row(3, 4, 5)])
    for micro in (1, 3, 8):
        lines, _ = trained(policy, tmp_path / str(micro), micro=micro)
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert lines[0]["accuracy"] == 0.5
        assert len(lines) == 2 and lines[1]["loss"] != lines[0]["loss"]
    first = seen[0::2]
    assert first[2].norm() > 0.01
    for other in first[:2]:
        assert torch.allclose(other, first[2], rtol=0, atol=1e-5 * first[2].norm())


def test_it_learns_which_of_two_words_is_better(policy, tmp_path, monkeypatch):
    """64 comparisons of 'yes' over 'no': right from the data to the score's sign."""
    data = write(tmp_path / "data.jsonl", *[
        dict(prompt=f"\n\nHuman: {i}?\n\nAssistant:", chosen="yes", rejected="no")
        for i in range(64)])
    lines, end = trained(policy, tmp_path / "out", data, test=str(data), pairs=0, lr=1e-2)
    assert len(lines) == 8 and lines[-1]["accuracy"] == 1.0 and lines[-1]["loss"] < 0.3
    assert end["gpt"]["scalar"] and end["finished"]


def test_too_few_comparisons_are_refused_and_not_called_finished(policy, tmp_path):
    data = write(tmp_path / "data.jsonl", *[GOOD] * 5)
    with pytest.raises(UserError, match="5 comparisons .* fewer than one --batch of 8"):
        trained(policy, tmp_path / "out", data, test=str(data), pairs=0)
    assert not (tmp_path / "out" / "ckpt.pt").exists()


def test_weights_and_soft_labels_reach_the_loss(policy, tmp_path):
    """The first loss is log 2 whatever the weights; the first gradient is what they make of it."""
    lines = [dict(prompt=f"\n\nHuman: {i}?\n\nAssistant:", chosen="yes", rejected="no", soft=0.8,
                  objective=("helpful", "harmless")[i % 2]) for i in range(8)]
    data = write(tmp_path / "data.jsonl", *lines)

    def norm(name, **flags):
        (first,), _ = trained(policy, tmp_path / name, data, test=str(data), pairs=0, **flags)
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        return first["grad_norm"]

    plain = norm("plain")
    assert norm("soft", soft=True) == pytest.approx(0.6 * plain, rel=1e-3)   # 2 * 0.8 - 1
    assert norm("zero", lambda_harmless=0.0) != pytest.approx(plain, rel=1e-3)
    half = write(tmp_path / "half.jsonl", *lines[::2] * 2)
    (first,), _ = trained(policy, tmp_path / "half", half, test=str(half), pairs=0)
    assert norm("again", lambda_harmless=0.0) == pytest.approx(first["grad_norm"], rel=1e-4)


def test_soft_labels_that_are_not_there_are_asked_for(policy, tmp_path):
    data = write(tmp_path / "data.jsonl", *[GOOD] * 8)
    with pytest.raises(UserError, match="--soft needs the field 'soft'"):
        trained(policy, tmp_path / "out", data, test=str(data), pairs=0, soft=True)
    with pytest.raises(UserError, match="name held-out lines with --test"):
        trained(policy, tmp_path / "other", data, pairs=0)


def test_demonstrations_come_to_mean_0(policy, tmp_path):
    """Differences stay what they were."""
    data = write(tmp_path / "data.jsonl", *[
        dict(prompt=f"\n\nHuman: {i}?\n\nAssistant:", chosen="yes" * (i % 3 + 1), rejected="no")
        for i in range(16)])
    scores = []
    for name, flags in (("plain", {}), ("center", dict(center=str(data)))):
        _, end = trained(policy, tmp_path / name, data, test=str(data), pairs=0, **flags)
        _, found, _ = score_lines(unpack(end).eval(), TOK, read_comparisons(data))
        scores.append(np.array(found))
    assert abs(scores[0][:, 0].mean()) > 1e-3 and abs(scores[1][:, 0].mean()) < 1e-5
    moved = scores[1] - scores[0]
    assert moved == pytest.approx(moved[0, 0], abs=1e-5)


# ---------------------------------------------------------------- collecting rankings, biases

def test_rankings_have_the_sizes_asked_for(policy, tmp_path):
    lines = collected(policy, tmp_path / "a", answers="4-6", count=12)
    sizes = [len(x["responses"]) for x in lines]
    assert set(sizes) <= {4, 5, 6} and len(set(sizes)) > 1
    assert all(len(x["gold"]) == len(x["responses"]) and "chosen" not in x for x in lines)
    for bad in ("1", "x", "4-", "5-4", "2-27", ""):
        with pytest.raises(UserError, match="--answers"):
            collected(policy, tmp_path / "bad", answers=bad)


def test_groups_take_turns_and_biases_are_told(policy, tmp_path):
    lines = collected(policy, tmp_path / "a", groups=3, count=20)
    assert {x["annotator"] for x in lines} == {"group 0", "group 1", "group 2"}
    long = collected(policy, tmp_path / "b", longer=1000.0, temperature=0.0)
    assert all(len(x["chosen"].split()) >= len(x["rejected"].split()) for x in long)
    plain = collected(policy, tmp_path / "c", temperature=0.0)
    assert {(x["chosen"], x["rejected"]) for x in plain} != {
        (x["chosen"], x["rejected"]) for x in long}


def test_what_is_typical_is_what_the_policy_finds_likely(policy, tmp_path, monkeypatch):
    """The annotator is told each answer's log-prob, and with that bias alone takes the likelier."""
    seen, sampled, judge, generate = [], [], world.judge, collect.generate
    monkeypatch.setattr(world, "judge", lambda *args: seen.append(args[2:5:2]) or judge(*args))
    monkeypatch.setattr(collect, "generate", lambda model, prompts, *args, **kwargs: (
        sampled.append((prompts, generate(model, prompts, *args, **kwargs))) or sampled[-1][1]))
    lines = collected(policy, tmp_path, typical=1e6, temperature=0.0, count=10)
    (prompts, (tokens, lengths, _)), = sampled
    model = gpt(3, scalar=False)
    for i, (texts, logps) in enumerate(seen[:10]):
        for j in range(2):
            answer = tokens[2 * i + j, :lengths[2 * i + j]].tolist()
            assert TOK.decode(answer).strip() == texts[j]
            ids = torch.tensor([prompts[i] + answer])
            mask = torch.arange(ids.shape[1])[None] >= len(prompts[i])
            assert logps[j] == pytest.approx(model.logprobs(ids, mask).sum().item(),
                                             abs=1e-3)
        assert lines[i]["chosen"] == texts[logps[1] > logps[0]]
