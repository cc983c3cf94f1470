"""Claims of Constitutional AI: revision, AI labels, the frontier, evasion, boilerplate (A01-A07).

A unit is a seed and a variant, 1 to 6 minutes on one core; its line is in
results/constitution.jsonl. One base and one distilled policy, micro, of the principles' world; a
seed has its own choices, PMs, revisions, labels and policies. Of what is chosen here, the snapshot
that revises (sqrt(KL) 1.2), the temperature of critiques and the share of answers to plain prompts
were picked by gold on seeds 1 and 100, before the runs that are recorded.

    helpful        RLHF on helpful choices alone; at sqrt(KL) 1.2 it answers and revises for SL-CAI
    hh             RLHF on both kinds of choices, by annotators for whom harm alone counts (before
                   the instruction to prefer who engages)
    hh engaged     the same by annotators who prefer who engages
    sl             SL-CAI; the rounds of its revisions, and those of revisions without a critique
    rl             RL-CAI: soft labels, a principle drawn for each pair
    reason         with reasoning first, labels held in 40 to 60%; `reason 80` in 20 to 80%,
                   `reason free` as they are
    hard, alone, harsh    hard labels; the first principle alone; the constitution before it was
                   softened
    all, alone few  the mean over all sixteen principles, of 500 pairs and not 4,500; as many labels
                   of the first alone
    people         RL from SL-CAI on the same pairs, of which annotators choose (engaged)
    text           RL from SL-CAI on the judgements that the base's text holds, without a loop
    elo, harm      read the policies of the others: simulated choices; the score from 0 to 4
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import collect
import constitution
import distill
import elo
import harm
import ppo
import preference
import pretrain
import prompts
from bradley_terry import fit
from claims.people import said
from claims.policies import load
from claims.records import append, missing
from claims.start import few, place, work
from common import metrics_of
from constitution import lines_in
from control import snapshots_of
from critic import facts_of, habits, revise, rounds_of, two_answers
from data import principles, world
from data.tokenizer import join
from elo import OBJECTIVES
from measures import mean_se

SNAPSHOTS = "0.4,0.8,1.2,1.6,2,2.4,2.8"       # sqrt(KL) from the start of RL
STEPS = 3600


# ---------------------------------------------------------------- made where it is missing

def base(cfg):
    """Folder of the base model of the principles' world."""
    folder = place(cfg, "cai/pretrain")
    pretrain.train(pretrain.Config(
        out=str(folder), world="principles", size="micro", context=512, vocab=1024, batch=32,
        documents=116000, lr=3e-3, every=600, steps=few(cfg, STEPS) if folder.parent.parent == work(
            cfg) else STEPS, device=cfg.device))
    return str(folder)


def distilled(cfg):
    folder = place(cfg, "cai/distill")
    distill.train(distill.Config(init=base(cfg), out=str(folder), device=cfg.device))
    return str(folder)


def own(cfg, seed, name):
    """Folder of a seed's own step."""
    return work(cfg) / f"cai-{seed}" / name


def chosen(cfg, seed, name, policy, count, **knobs):
    """Folder of comparisons of a policy's answers."""
    folder = own(cfg, seed, name)
    collect.collect(collect.Config(policy=policy, out=str(folder), count=few(cfg, count),
                                   seed=seed, device=cfg.device, **knobs))
    return str(folder)


def helpful_choices(cfg, seed):
    return chosen(cfg, seed, "choices-helpful", distilled(cfg), 3000, harmful=0.0)


def pretrained(cfg, seed):
    """Folder of a PM pretrained on pairs about plain prompts alone."""
    folder = own(cfg, seed, "pmp")
    preference.train(preference.Config(init=base(cfg), harmful=0.0, pairs=few(cfg, 24000), lr=2e-3,
                                       out=str(folder), seed=seed, device=cfg.device))
    return str(folder)


def rlhf(cfg, seed, name, data):
    """Folder of RLHF from the distilled policy on choices, with prompts of both kinds; its PM's."""
    pm, folder = own(cfg, seed, f"pm-{name}"), own(cfg, seed, f"rlhf-{name}")
    preference.train(preference.Config(init=pretrained(cfg, seed), data=data, pairs=0, lr=6e-4,
                                       out=str(pm), seed=seed, device=cfg.device))
    ppo.train(ppo.Config(policy=distilled(cfg), pm=str(pm), out=str(folder),
                         iterations=few(cfg, 50), snapshots=SNAPSHOTS, micro=64, every=10**6,
                         seed=seed, device=cfg.device))
    return str(folder), str(pm)


def helpful_only(cfg, seed):
    return rlhf(cfg, seed, "helpful", helpful_choices(cfg, seed))


def reviser(cfg, seed):
    """Helpful-only RLHF at sqrt(KL) 1.2: further on, one of this size forgets how to revise."""
    folder = helpful_only(cfg, seed)[0]
    near = [str(x) for x in snapshots_of(folder) if float(x.stem[9:]) <= 1.2]
    return near[-1] if near else folder


def judged(cfg, person, tok, model, ask, rows):
    """A line of an annotator's choice for each red-team row: of pairs as AI feedback gets them."""
    talks, pairs = two_answers(cfg, tok, model, ask, rows)
    lines = [world.judge(world.keyed("harmless", cfg.seed, int(r)), *both, person)
             for r, *both in zip(rows, talks, pairs, strict=True)]
    return [x and dict(x, prompt=join(x["prompt"], answer=True)) for x in lines]


def both_kinds(cfg, seed, engaged):
    """RLHF on as many harmless choices as RL-CAI has labels, also with answers to plain prompts."""
    name = "hh-engaged" if engaged else "hh"
    asked = constitution.Config(out=str(own(cfg, seed, name)), generated=generated(cfg, seed),
                                seed=seed, device=cfg.device)
    harmless = constitution.made(asked, "choices", few(cfg, 4500), [distilled(cfg)],
                                 partial(judged, asked, world.Annotator(engaged=engaged)))
    return rlhf(cfg, seed, name, f"{helpful_choices(cfg, seed)},{harmless}")


def generated(cfg, seed):
    """Folder of requests that the base model writes, most of them harmful."""
    folder = own(cfg, seed, "prompts")
    prompts.generate_prompts(prompts.Config(model=base(cfg), harmful=0.8, count=few(cfg, 1000),
                                            out=str(folder), seed=seed, device=cfg.device))
    return str(folder)


def asked_of(cfg, seed, name, **knobs):
    """The Config of a run of constitution.py."""
    return constitution.Config(**{**dict(
        init=base(cfg), policy=reviser(cfg, seed), data=helpful_choices(cfg, seed),
        pmp=pretrained(cfg, seed), out=str(own(cfg, seed, name)), count=few(cfg, 1500),
        helpful_count=few(cfg, 1500), iterations=few(cfg, 50),
        pairs=few(cfg, 500 if knobs.get("principle") == "all" else 4500),
        generated=generated(cfg, seed), snapshots=SNAPSHOTS, seed=seed, device=cfg.device),
        **knobs})


def cai(cfg, seed, name, **knobs):
    """The Config of a run of constitution.py, which is done."""
    asked = asked_of(cfg, seed, name, **knobs)
    constitution.train(asked)
    return asked


def sl(cfg, seed):
    """Folder of SL-CAI."""
    return str(Path(cai(cfg, seed, "sl", iterations=0).out) / "sl")


def reinforced(cfg, seed, variant):
    """Folder of a variant's run from SL-CAI with labels of its own."""
    return Path(cai(cfg, seed, variant, sl=sl(cfg, seed), **KNOBS[variant]).out)


# ---------------------------------------------------------------- what is measured

def look(cfg, path, seed):
    """Gold of 200 plain and 200 harmful prompts' answers, and the habits of the latter."""
    pairs = [(world.request_of(turns), text) for turns, text in said(cfg, str(path), seed)]
    plain = [world.gold(*x)[0] for x in pairs if not x[0].harmful]
    refused = [world.refuses(*x) for x in pairs if not x[0].harmful]
    told = habits([x for x in pairs if x[0].harmful])
    return dict(helpful=mean_se(plain)[0], harmless=told.pop("gold"),
                refuses_plain=sum(refused) / len(refused), **told)


def stations(start, folder):
    """[(sqrt(KL), path)] of an RL run: its start, its snapshots, its end."""
    last = max(metrics_of(folder)[-1]["kl"], 0) ** 0.5
    return [(0.0, start), *((float(x.stem[9:]), str(x)) for x in snapshots_of(folder)),
            (last, str(folder))]


def path_of(cfg, start, folder, seed):
    return [dict(root=root, **look(cfg, path, seed)) for root, path in stations(start, folder)]


def told_pm(cfg, pm, seed):
    """A PM on pairs of SL-CAI's answers to other red-team prompts: how often it prefers the one of
    more gold, and the cross-entropy (nats) of its chances to those of annotators.
    """
    lines = preference.read_comparisons(chosen(cfg, seed, "test", sl(cfg, seed), 800, harmful=1.0,
                                               tranche="cai test"))
    kept, scores, _ = preference.score_lines(load(pm)[1], load(pm)[0], lines)
    right = [(a > b) == (x["gold"][0] > x["gold"][1]) for (a, b), x in zip(scores, kept)
             if x["gold"][0] != x["gold"][1]]
    soft = torch.tensor([x["soft"] for x in kept], dtype=torch.float64)
    nats = preference.preference_loss(*torch.tensor(scores, dtype=torch.float64).T, soft)
    return dict(gold=sum(right) / len(right), nats=nats.mean().item())


def told_labels(folder):
    """Of AI labels: how sure, how much for the first place, how often for the better by gold."""
    lines = lines_in(folder)
    found = facts_of(lines)
    return dict(sure=found["confidence"], first=found["position_bias"],
                apart=mean_se([abs(x["orders"][0] + x["orders"][1] - 1) for x in lines])[0],
                gold=found["gold_agreement"],
                two=mean_se([p * p + (1 - p) ** 2 for p in (
                    world.preference(*x["gold"]) for x in lines)])[0])


def told_run(cfg, seed, run):
    """The numbers of a run from SL-CAI: its path, its PM."""
    return dict(path=path_of(cfg, sl(cfg, seed), Path(run.out) / "rl", seed),
                pm=told_pm(cfg, str(Path(run.out) / "pm"), seed))


def others(cfg, seed, name, lines):
    """The numbers of RL from SL-CAI where these lines take the place of AI labels."""
    run, start = asked_of(cfg, seed, name), sl(cfg, seed)
    both = zip(*map(constitution.split, (lines, constitution.helpful_choices(run))))
    pm = constitution.preference_model(run, SimpleNamespace(rank=0), *(x + y for x, y in both))
    ppo.train(constitution.rl_config(run, start, pm))
    return told_run(cfg, seed, run)


def people(cfg, seed):
    """The lines of `rl` with annotators' choices in place of AI labels; how often these agree."""
    lines, out = preference.read_comparisons(reinforced(cfg, seed, "rl") / "feedback"), []
    for i, line in enumerate(lines):
        judged = world.judge(world.keyed("people", seed, i), line["prompt"],
                             [line["chosen"], line["rejected"]])
        out.append(dict(judged, soft=1.0))
    same = [x["chosen"] == y["chosen"] for x, y in zip(lines, out)]
    return out, sum(same) / len(same)


def text_lines(cfg):
    """As many judgements of the base's own text."""
    lines = principles.comparisons(0, few(cfg, 11000))[:few(cfg, 4500)]
    return [dict(x, soft=1.0) for x in lines]


# ---------------------------------------------------------------- the variants

def rlhf_unit(cfg, seed, made):
    folder, pm = made(cfg, seed)
    return dict(path=path_of(cfg, distilled(cfg), folder, seed), pm=told_pm(cfg, pm, seed))


def sl_unit(cfg, seed):
    start, policy = sl(cfg, seed), reviser(cfg, seed)
    bare = constitution.Config(policy=policy, critique=False, seed=seed, device=cfg.device,
                               generated=generated(cfg, seed), out=str(own(cfg, seed, "bare")))
    found = principles.read_constitution()
    folder = constitution.made(bare, "revisions", few(cfg, 1500), [policy],
                               partial(revise, bare, found))
    return dict(rounds=rounds_of(lines_in(own(cfg, seed, "sl") / "revisions")),
                bare=rounds_of(lines_in(folder)), path=[dict(root=0.0, **look(cfg, start, seed))])


def few_alone(cfg, seed):
    """RL on as many labels of one principle as `all` has of sixteen."""
    lines = preference.read_comparisons(reinforced(cfg, seed, "alone") / "feedback")
    return others(cfg, seed, "alone few", lines[:few(cfg, 500)])


def people_unit(cfg, seed):
    lines, agree = people(cfg, seed)
    return dict(others(cfg, seed, "people", lines), agree=agree)


LABELS_OF = dict(hard="rl", **{"reason 80": "reason", "reason free": "reason"})
KNOBS = {"rl": {}, "reason": dict(reason=True, clamp=0.6),
         "reason 80": dict(clamp=0.8), "reason free": {},
         "hard": dict(hard=True), "alone": dict(principle="harm"), "all": dict(principle="all"),
         "harsh": dict(constitution="data/harsh.txt")}


def cai_unit(cfg, seed, variant):
    of = LABELS_OF.get(variant)
    labels = str(reinforced(cfg, seed, of) / "feedback") if of else ""
    run = cai(cfg, seed, variant, sl=sl(cfg, seed), labels=labels, **KNOBS[variant])
    told = {} if of else dict(labels=told_labels(Path(run.out) / "feedback"))
    return dict(told_run(cfg, seed, run), **told)


def stations_of(cfg, seed):
    """{run: its stations} of the runs that the frontier compares."""
    begin, after = distilled(cfg), sl(cfg, seed)
    found = dict(helpful=(begin, helpful_only(cfg, seed)[0]),
                 hh=(begin, both_kinds(cfg, seed, False)[0]),
                 **{"hh engaged": (begin, both_kinds(cfg, seed, True)[0])},
                 **{x: (after, reinforced(cfg, seed, x) / "rl") for x in ("rl", "reason")})
    return {name: stations(*two) for name, two in found.items()}


def station_name(run, i):
    """What station i of a run is called; both runs from SL-CAI begin with the same one."""
    return "sl" if not i and run in ("rl", "reason") else f"{run} {i}"


def elo_unit(cfg, seed):
    """Elo of all stations, SL-CAI 0: helpful; harmless as judged by annotators who prefer who
    engages, and by those who don't. [sqrt(KL), helpful, harmless, harmless before] each.
    """
    found, texts, asked = stations_of(cfg, seed), {"helpful": {}, "harmless": {}}, {}
    for run, own_stations in found.items():
        for i, (_, path) in enumerate(own_stations):
            name = station_name(run, i)
            pairs = said(cfg, str(path), seed)
            half = len(pairs) // 2
            for kind, some in zip(OBJECTIVES, (pairs[:half], pairs[half:])):
                some = some[:few(cfg, 100)]
                texts[kind][name] = [text for _, text in some]
                asked[kind] = [(j, turns, None) for j, (turns, _) in enumerate(some)]
    scores = []
    for kind, engaged in (("helpful", True), ("harmless", True), ("harmless", False)):
        noise = SimpleNamespace(noise=0.6, seed=seed, engaged=engaged)
        names, wins = elo.wins_of(elo.choices(noise, kind, asked[kind], texts[kind]))
        scores.append(dict(zip(names, fit(wins, names.index("sl"))["elo"])))
    return dict(elo={run: [[root, *(x[station_name(run, i)] for x in scores)]
                           for i, (root, _) in enumerate(own_stations)]
                     for run, own_stations in found.items()})


def harm_unit(cfg, seed):
    """[sqrt(KL), predicted harmfulness of answers, its truth] of all stations; how well the scorer
    foretells ratings.
    """
    found, folder = stations_of(cfg, seed), own(cfg, seed, "harm")
    attacked = (base(cfg), distilled(cfg), helpful_only(cfg, seed)[0])
    harm.train(harm.Config(
        init=base(cfg), attacked=",".join(attacked), out=str(folder), count=few(cfg, 3000),
        policies=tuple(f"{run.replace(' ', '-')}:{i}={path}" for run, some in found.items()
                       for i, (_, path) in enumerate(some)),
        samples=few(cfg, 32), seed=seed, device=cfg.device))
    told = json.loads((folder / "harm.json").read_text())
    scores = {run: [told["policies"][f"{run.replace(' ', '-')}:{i}"] for i in range(len(some))]
              for run, some in found.items()}
    return dict(harm={run: [[root, x["mean"], x["success"]]
                            for (root, _), x in zip(some, scores[run], strict=True)]
                      for run, some in found.items()}, tests=told["tests"])


VARIANTS = {
    "helpful": partial(rlhf_unit, made=helpful_only),
    "hh": partial(rlhf_unit, made=partial(both_kinds, engaged=False)),
    "hh engaged": partial(rlhf_unit, made=partial(both_kinds, engaged=True)),
    "sl": sl_unit,
    **{name: partial(cai_unit, variant=name) for name in KNOBS},
    "people": people_unit,
    "alone few": few_alone,
    "text": lambda cfg, seed: others(cfg, seed, "text", text_lines(cfg)),
    "elo": elo_unit,
    "harm": harm_unit,
}


def measure(cfg):
    """The units that have no line yet."""
    for unit in missing("constitution", cfg.seeds, variant=tuple(VARIANTS)):
        append("constitution", {**unit, **VARIANTS[unit["variant"]](cfg, unit["seed"])})
