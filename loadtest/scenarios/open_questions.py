"""Requests for open loops: half go on with a conversation, half ask about hot documents.

Model     single requests by a Poisson process; a conversation's history is made up, as its answers are not waited for
Valid     the same seed gives the same requests at the same moments
Blind to  users who leave because they wait
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from loadtest.scenarios import words
from loadtest.scenarios.arrivals import Rate, poisson_times
from loadtest.scenarios.prompts import Library, Message, system_text

Question = tuple[float, Sequence[Message], int]
OPEN_CONVERSATIONS = 24  # at a time; each request goes on with one of them


def questions(
    rate: Rate,
    *,
    most_rps: float,
    until_s: float,
    rng: random.Random,
    tokens: Callable[[float], int],
    salt: str,
) -> Iterator[Question]:
    """When due, what to send, most tokens of the answer. tokens : a usual length as it is wanted in this run"""
    library = Library(count=200, tokens=tokens(1500), exponent=1.1)
    system = system_text("open", tokens(1000), salt=salt)
    histories: list[list[Message]] = [[] for _ in range(OPEN_CONVERSATIONS)]
    for at_s in poisson_times(rate, most_rps=most_rps, until_s=until_s, rng=random.Random(rng.random())):
        limit = words.about(rng, tokens(200))
        if rng.random() < 0.5:
            found = library.draw(rng, 4)
            yield at_s, library.question(rng, found, tokens=tokens(40), system=system), limit
        else:
            yield at_s, _next_turn(rng.choice(histories), rng, tokens=tokens, system=system), limit


def _next_turn(
    history: list[Message], rng: random.Random, *, tokens: Callable[[float], int], system: str
) -> list[Message]:
    """The next prompt of a conversation, which begins anew at eight turns or so."""
    if rng.random() < 1 / 8:
        history.clear()
    if not history:
        history.append({"role": "system", "content": system})
    else:
        history.append({"role": "assistant", "content": words.text(rng, tokens(150))})
    history.append({"role": "user", "content": words.text(rng, words.about(rng, tokens(80)))})
    return list(history)
