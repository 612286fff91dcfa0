"""Texts by seed: the same seed gives the same words, and equal beginnings stay equal.

Model     common English words drawn evenly, so that vocabularies of today need about one token for each
Valid     sizes in tokens are rough, within some 20 % for such vocabularies; a replica's own count is in `usage`
Blind to  meaning: what a model answers to this says nothing of the model
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

WORDS: list[str] = re.findall(
    r"\w+",
    "the of and to in is that it was for on are with as his they be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way about "
    "many then them would write like so these her long make thing see him two has look more day could go come did my "
    "sound no most number who over know water than call first people may down side been now find any new work part "
    "take get place made live where after back little only round man year came show every good me give our under name "
    "very through just form much great think say help low line before turn cause same mean differ move right boy old "
    "too does tell sentence set three want air well also play small end put home read hand port large spell add even "
    "land here must big high such follow act why ask men change went light kind off need house picture try us again "
    "animal point mother world near build self earth father head stand own page should country found answer school",
)


def text(rng: random.Random, tokens: int) -> str:
    """`tokens` words, >= 0."""
    return " ".join(rng.choices(WORDS, k=tokens))


def named_text(name: str, tokens: int) -> str:
    """The text that belongs to a name: the same in every process."""
    return text(random.Random(name), tokens)


@lru_cache(maxsize=8192)
def exact_text(name: str, characters: int) -> str:
    """The named text cut to as many characters, for replicas that count tokens by length."""
    return named_text(name, characters // 2 + 1)[:characters].ljust(characters, ".")


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Popularity of the 1st, 2nd, ... of `count` things, summing to 1; exponent 0 is even.

    Raises
    ------
    ValueError : count < 1, or a negative exponent.
    """
    if count < 1 or not 0.0 <= exponent < 100.0:
        raise ValueError(f"popularity needs at least one thing and an exponent of 0 or more, not {count}, {exponent}")
    raw = [(rank + 1) ** -exponent for rank in range(count)]
    whole = sum(raw)
    return [weight / whole for weight in raw]


def about(rng: random.Random, mean: float, *, spread: float = 0.5) -> int:
    """A count with that mean and a log-normal tail, at least 1. spread : of its logarithm, >= 0"""
    return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))
