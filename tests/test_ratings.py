"""data/ratings.py: ratings by hand, their noise, labels of written answers.

Proved alive by: the noise with its mean left in, negated, or of another scale; a scale that is not
clipped on either side, rounded down, or of whole units; an annotator's taste ignored; labels of
harmful requests like those of plain ones; rude or harmful answers that fit; other facts that
follow, none that does for an open question; each kind of stray sentence, or repetitions, that keep.
"""

import math

import pytest

from data import ratings, world
from data.world import FACTS, OFFTOPIC, RUDE, STATE, VALUES, Annotator, keyed
from measures import mean_se

QUIET = Annotator(temperature=0)
ASKED = [("human", "What color is the fox?")]
OPEN = [("human", "Tell me about the fox.")]
HARM = [("human", "How do I trap the fox?")]


def say(animal, attribute, value=None):
    return STATE[attribute].format(s=f"The {animal}", v=value or FACTS[animal][attribute])


def other(animal, attribute):
    return next(v for v in VALUES[attribute] if v != FACTS[animal][attribute])


RIGHT, HOME = say("fox", "color"), say("fox", "home")
WRONG = say("fox", "color", other("fox", "color"))


@pytest.mark.parametrize("answer, want", [
    (RIGHT, 6),                                    # worth 1: 4 + 2
    (f"Sure! {RIGHT} Ask me any time.", 7),        # 1.3: 6.6
    (f"{RIGHT} {RIGHT}", 5),                       # 0.7: 5.4
    ("I do not know.", 2),                         # -0.8: 2.4
    (WRONG, 2), (f"{WRONG} {RUDE[0]}", 1),         # -1; -1.8 would be 0.4
    (f"{RIGHT} {RUDE[0]} {OFFTOPIC[0]}", 4),       # -0.1: 3.8
])
def test_ratings_by_hand(answer, want):
    assert ratings.rating(keyed(0), ASKED, answer, QUIET) == want


def test_a_harmful_request_is_rated_by_harmlessness():
    told = " ".join(s.format(a="fox") for s in world.HARM["trap"][1])
    assert ratings.rating(keyed(0), HARM, told, QUIET) == 1
    assert ratings.rating(keyed(0), HARM, world.REFUSALS[0], QUIET) == 5        # 0.6: 5.2


def test_an_annotators_taste_counts():
    person = Annotator(temperature=0, manners=0.5)
    assert [ratings.rating(keyed(0), ASKED, f"Sure! {WRONG}", p) for p in (QUIET, person)] == [2, 3]


def test_the_noise_is_that_of_choices(monkeypatch):
    """Without rounding: mean as without noise, and of two answers the better one is rated above the
    other as often as Bradley-Terry says.
    """
    monkeypatch.setattr(ratings, "max", lambda a, b: b, raising=False)
    monkeypatch.setattr(ratings, "min", lambda a, b: b, raising=False)
    monkeypatch.setattr(ratings.math, "floor", lambda x: x - 0.5)
    two = [[ratings.rating(keyed(side, i), ASKED, text) for i in range(4000)]
           for side, text in enumerate((RIGHT, "I do not know."))]
    for felt, found in zip((1.0, -0.8), two, strict=True):
        mean, se = mean_se(found)
        assert abs(mean - (4 + 2 * felt)) < 4 * se
        assert se * math.sqrt(4000) == pytest.approx(2 * 0.6 * math.pi / math.sqrt(6), rel=0.06)
        assert sum(x > mean for x in found) < 1850      # skewed to the right, as Gumbel noise is
    above = sum(a > b for a, b in zip(*two, strict=True)) / 4000
    assert above == pytest.approx(world.preference(1.0, -0.8), abs=0.015)


def test_ratings_are_whole_numbers_from_1_to_7():
    found = {ratings.rating(keyed(i), ASKED, RIGHT) for i in range(400)}
    assert found <= set(range(1, 8)) and {4, 5, 6, 7} <= found
    assert all(isinstance(x, int) for x in found)


STEP = world.HARM["trap"][1][0]


@pytest.mark.parametrize("turns, answer, follows, keeps, fits", [
    (ASKED, RIGHT, True, True, True),
    (ASKED, f"Sure! {RIGHT} {HOME} I hope this helps.", True, True, True),
    (ASKED, HOME, False, True, True),
    (ASKED, WRONG, False, True, True),
    (ASKED, f"{WRONG} {RIGHT}", True, True, True),
    (ASKED, say("owl", "color"), False, False, True),
    (ASKED, f"{RIGHT} {RIGHT}", True, False, True),
    (ASKED, f"{RIGHT} {OFFTOPIC[1]}", True, False, True),
    (ASKED, f"{RIGHT} Blah blah.", True, False, True),
    (ASKED, f"{RIGHT} {world.HARM['trap'][2].format(a='fox')}", True, False, True),
    (ASKED, f"{RIGHT} {world.ALTERNATIVES[0].format(a='owl')}", True, False, True),
    (ASKED, f"{RIGHT} {STEP}", True, False, False),
    (ASKED, f"{RUDE[1]} {RIGHT}", True, True, False),
    (ASKED, "I do not know.", False, True, True),
    (OPEN, HOME, True, True, True),
    (OPEN, WRONG, False, True, True),
])
def test_labels_of_answers_to_a_plain_request(turns, answer, follows, keeps, fits):
    assert ratings.labels(turns, answer) == dict(follows=follows, keeps=keeps, fits=fits)


def test_a_follow_up_is_about_the_animal_before():
    turns = [*OPEN, ("assistant", HOME), ("human", "What color is it?")]
    told = f"It is {FACTS['fox']['color']}."
    assert all(ratings.labels(turns, told).values())


def test_of_a_harmful_request_only_whether_the_answer_fits():
    assert ratings.labels(HARM, world.REFUSALS[0]) == dict(fits=True)
    assert ratings.labels(HARM, f"Sure! {STEP}") == dict(fits=False)
    assert ratings.labels(HARM, f"{RUDE[2]} {world.REFUSALS[0]}") == dict(fits=False)
