"""`tfirst calc pages` and `resume`: what of saved state is of use, and how a request goes on after a failure."""

from __future__ import annotations

from estimators.planning.recovery import Resumption, page_segments, page_use, patience_s, resume
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Table, Value
from router.cli.calc.inputs import NamedCard, card, count, model, number

MIB, KIB, GB = 2.0**20, 2.0**10, 1e9

PAGE_INPUTS = (
    model(),
    card("card", "A100", "card that computes what is missing"),
    count("prompt-tokens", 1024, "tokens", "prompt of the request that reads", low=1),
    count("stored-tokens", 1024, "tokens", "of it whose pages are stored", low=0),
    count("page-tokens", 16, "tokens", "in a page", low=1),
    number("read-gb-s", 7.1, "GB/s", "storage, read", above=True),
)


def answer_pages(
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    stored_tokens: int,
    page_tokens: int,
    read_gb_s: float,
) -> Answer:
    use = page_use(
        prompt_tokens=prompt_tokens,
        stored_tokens=stored_tokens,
        page_tokens=page_tokens,
        token_bytes=float(costs_of(model).kv_bytes(1.0)),
    )
    roofline = Roofline.of(model, card.card)
    compute_s = roofline.prefill_s(new_tokens=prompt_tokens, cached_tokens=0)
    rest_s = roofline.prefill_s(new_tokens=prompt_tokens - use.used_tokens, cached_tokens=use.used_tokens)
    read_s = use.read_bytes / (read_gb_s * GB)
    pieces, piece_bytes = page_segments(layers=model.layers, page_bytes=use.page_bytes, gathered=False)
    return Answer(
        [
            Value("page_mib", use.page_bytes / MIB, "MiB"),
            Value("pages_read", use.read_pages, "pages"),
            Value("pages_used", use.used_pages, "pages"),
            Value("read_mib", use.read_bytes / MIB, "MiB"),
            Value("used_mib", use.used_bytes / MIB, "MiB"),
            Value("used_tokens", use.used_tokens, "tokens"),
            Value("segments_of_a_page", pieces, f"of {piece_bytes / KIB:g} KiB, where layers are apart"),
            Value("read_ms", read_s * 1e3, "ms"),
            Value("compute_rest_ms", rest_s * 1e3, "ms after the read"),
            Value("compute_all_ms", compute_s * 1e3, "ms without it"),
            Value("patience_ms", patience_s(read_s=read_s + rest_s, compute_s=compute_s) * 1e3, "ms to wait, at most"),
        ]
    )


RESUME_INPUTS = (
    model(),
    card("card", "A100", "card it goes on on"),
    count("prompt-tokens", 8192, "tokens", "prompt", low=1),
    count("answered-tokens", 1025, "tokens", "of the answer that the client has", low=1),
    count("saved-tokens", 8192, "tokens", "from the start whose state was saved"),
    number("read-gb-s", 25, "GB/s", "way to the saved state", above=True),
)


def answer_resume(
    *,
    model: ModelShape,
    card: NamedCard,
    prompt_tokens: int,
    answered_tokens: int,
    saved_tokens: int,
    read_gb_s: float,
) -> Answer:
    roofline = Roofline.of(model, card.card)

    def way(saved: int, *, logged: bool) -> Resumption:
        return resume(
            roofline,
            prompt_tokens=prompt_tokens,
            answered_tokens=answered_tokens,
            saved_tokens=saved,
            logged=logged,
            read_bytes_per_s=read_gb_s * GB,
        )

    ways = {
        "saved state and token log": way(saved_tokens, logged=True),
        "token log alone": way(0, logged=True),
        "saved state alone": way(saved_tokens, logged=False),
        "neither": way(0, logged=False),
    }
    best = ways["saved state and token log"]
    values = [
        Value("state_tokens", best.state_tokens, "tokens the next one stands on"),
        Value("replayed_tokens", best.replayed_tokens, "tokens of one prefill"),
        Value("read_ms", best.read_s * 1e3, "ms"),
        Value("replay_ms", best.replay_s * 1e3, "ms"),
        Value("ready_ms", best.ready_s * 1e3, "ms until the next token can be decoded"),
        Value("without_log_s", ways["saved state alone"].ready_s, "s, and another answer"),
    ]
    rows = [
        (name, one.read_s * 1e3, one.replayed_tokens, one.replay_s * 1e3, one.redrawn_tokens, one.ready_s)
        for name, one in ways.items()
    ]
    columns = ("what was kept", "read, ms", "replayed tokens", "replay, ms", "drawn again", "ready, s")
    note = "Tokens drawn again differ from what the client has seen wherever sampling is by chance."
    return Answer(values, [Table("Going on after the failure", columns, rows)], [note])


RECOVERY = (
    Calculator("pages", "pages of saved state that are read, and those that are of use", PAGE_INPUTS, answer_pages),
    Calculator("resume", "go on with a request whose replica was lost", RESUME_INPUTS, answer_resume),
)
