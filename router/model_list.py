"""The merged list of models: what replicas that are up say of each, as far as they say the same.

Model     a model that one endpoint serves keeps its card as it came. Of one that several serve, what they agree on is
          told, the earliest `created` and the shortest `max_model_len`, because any of them may get the request
Valid     the cards of vLLM and SGLang, and any other with an `id`
Blind to  what replicas that are down would say
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Card = dict[str, Any]
_SMALLEST = ("created", "max_model_len")


def merged(lists: Iterable[Iterable[Card]], aliases: Mapping[str, str]) -> list[Card]:
    """One card for each model of `lists`, sorted by name, and one for each alias of any of them.

    lists : cards of each endpoint that is up
    aliases : name that clients use -> name the replicas know; a name that is served itself is none
    """
    same: dict[str, list[Card]] = {}
    for cards in lists:
        for card in cards:
            same.setdefault(card["id"], []).append(card)
    found = {name: _agreed(cards) for name, cards in sorted(same.items())}
    known = [(alias, found[name]) for alias, name in aliases.items() if name in found and alias not in found]
    return [*found.values(), *({**card, "id": alias} for alias, card in known)]


def _agreed(cards: list[Card]) -> Card:
    first, *others = cards
    agreed = {key: value for key, value in first.items() if all(key in card and card[key] == value for card in others)}
    for key in _SMALLEST:
        numbers = [card[key] for card in cards if isinstance(card.get(key), int)]
        if len(numbers) == len(cards):
            agreed[key] = min(numbers)
    return agreed
