"""What the toy world's annotators say of one answer alone: a rating from 1 to 7, yes/no labels.

InstructGPT's labelers rate every answer before they compare any, and say whether it follows the
instruction, keeps the constraints of it and is fit for an assistant. Here a rating is a fixed map
of what the annotator feels the answer is worth, with the noise of their choices: two ratings'
noises differ as a Bradley-Terry choice does.

    rating = clip( round( 4 + 2 (u + g) ), 1, 7 ),   g = Gumbel noise of scale temperature, mean 0

A step is half a gold unit: 4 is an answer worth nothing, the thresholds are at -1.25, -0.75, ...,
1.25.
"""

import math

from data.world import FACTS, PLAIN, meanings, request_of

EULER = 0.5772156649015329     # mean of the standard Gumbel distribution
LABELS = ("follows", "keeps", "fits")


def rating(rng, turns, answer, annotator=PLAIN):
    """An annotator's rating of an answer to the last of turns, 1 to 7; rng draws the noise."""
    noise = -math.log(rng.expovariate(1.0)) - EULER
    felt = annotator.utility(turns, answer) + annotator.temperature * noise
    return min(7, max(1, math.floor(4.5 + 2 * felt)))


def labels(turns, answer):
    """{label: yes or no}, from the text alone; of a harmful request `fits` only.

    follows: it states a right fact that was asked for. keeps: it speaks of the named animal and of
    nothing else, and nothing twice; every request of the world says "about this animal". fits: it
    is not rude and helps with no harm, whatever was asked for.
    """
    request = request_of(turns)
    found = meanings(request, answer)
    out = dict(fits=not any(m[0] in ("rude", "step") for m in found))
    if not request.harmful:
        wanted = {("fact", request.animal, k, v) for k, v in FACTS[request.animal].items()
                  if request.kind in ("open", k)}
        astray = any(m[0] in ("offtopic", "noise", "step", "why") or m[0] in ("fact", "alternative")
                     and m[1] != request.animal for m in found)
        out |= dict(follows=not wanted.isdisjoint(found),
                    keeps=not astray and len(set(found)) == len(found))
    return out
