"""Which layers of a config.json see everything, a window, or keep a recurrent state.

Source    transformers 4.57: `layer_types` where a file has it; else Gemma's pattern (every n-th layer sees everything),
          Qwen2's `use_sliding_window` from `max_window_layers` on, Mistral's one window for all, Qwen3-Next's
          `full_attention_interval`
"""

from __future__ import annotations

from estimators.model_keys import Keys
from estimators.shapes import Kind

_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "recurrent",
}


def layer_pattern(keys: Keys, layers: int) -> tuple[tuple[Kind, ...], int | None]:
    """The shortest pattern that gives each layer its kind, and the window in tokens (None: no layer has one)."""
    kinds = layer_kinds(keys, layers)
    window = keys.count("sliding_window") if "window" in kinds else None
    return shortest_pattern(kinds), window


def layer_kinds(keys: Keys, layers: int) -> list[Kind]:
    """The kind of each layer, in order."""
    named = keys.get("layer_types")
    if named:
        return _named_kinds(keys, named, layers)
    if keys.has("full_attention_interval"):
        every = keys.count("full_attention_interval")
        return ["full" if (layer + 1) % every == 0 else "recurrent" for layer in range(layers)]
    if not keys.get("sliding_window"):
        return ["full"] * layers
    if keys.has("sliding_window_pattern"):
        every = keys.count("sliding_window_pattern")
        return ["full" if (layer + 1) % every == 0 else "window" for layer in range(layers)]
    if keys.get("use_sliding_window") is not None:
        first = keys.get("max_window_layers") or 0
        windowed = keys.flag("use_sliding_window")
        return ["window" if windowed and layer >= first else "full" for layer in range(layers)]
    return ["window"] * layers


def _named_kinds(keys: Keys, named: object, layers: int) -> list[Kind]:
    if not isinstance(named, list) or len(named) != layers:
        raise keys.error("layer_types", f"`layer_types` does not name each of the {layers} layers")
    for kind in named:
        if kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise keys.error("layer_types", f"`layer_types` has {kind!r}, which is none of {known}")
    return [_KINDS[kind] for kind in named]


def shortest_pattern(kinds: list[Kind]) -> tuple[Kind, ...]:
    """The shortest run that, repeated and cut to length, gives `kinds`.

    >>> shortest_pattern(["window", "full", "window", "full", "window"])
    ('window', 'full')
    """
    for length in range(1, len(kinds)):
        if all(kind == kinds[place % length] for place, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)
