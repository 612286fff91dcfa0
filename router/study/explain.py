"""One receipt in words: what was chosen, why, and what came of it.

Model     a rule that takes the smallest value is explained by comparing what it chose with the candidate whose first
          token was expected soonest, the chosen one apart, and by what the rule counts beside the first token
Valid     receipts that name the chosen candidate; with `others: best` the comparison is with the best that are named
Blind to  a policy's own weights and settings, which receipts do not carry
"""

from __future__ import annotations

from estimators.price import joining_rate_rps
from router.receipts import Candidate, Receipt
from router.study.bars import seconds

REASONS = {
    "only_ready": "no other replica could be chosen",
    "next_in_turn": "it was that replica's turn",
    "drawn": "it was drawn by chance",
    "lower_load": "it was the less loaded",
    "prefix_hash": "its prefix belongs there",
    "overflow": "the replica its prefix belongs to was over its bound",
    "longest_prefix": "it had most of the prompt",
    "no_prefix": "nobody had enough of the prompt to follow it",
    "best_score": "it had the best score",
    "lowest_estimate": "it had the lowest estimate",
    "explored": "it was drawn by chance, to learn what comes of it",
    "best_effort": "no candidate was likely enough to meet the deadlines, and it had the lowest estimate",
}
NOTICED_S = 1e-3  # shorter differences are not worth a word


def why(receipt: Receipt) -> str:
    """One sentence on why it ran where it did."""
    choice = receipt.choice
    if choice is None:
        return _not_placed(receipt)
    where = f"{choice.replica} by {_path(choice, receipt.prompt_tokens)}"
    reason = REASONS.get(receipt.reason or "", f"the rule says {(receipt.reason or 'nothing').replace('_', ' ')}")
    by = f"{receipt.policy}, asked for by the client," if receipt.override else receipt.policy
    return f"{by} took {where}: {reason}{_compared(receipt, choice)}."


def best_other(receipt: Receipt) -> Candidate | None:
    """The candidate, other than the chosen, whose first token was expected soonest; None when no other is named."""
    others = [one for index, one in enumerate(receipt.candidates) if index != receipt.chosen]
    return min(others, key=lambda one: one.expected_s, default=None)


def what_came(receipt: Receipt) -> str:
    """One sentence on how it ended."""
    waited_s, choice = receipt.waited_s, receipt.choice
    outcome = (receipt.outcome or "unknown").replace("_", " ")
    how = f"It ended {outcome}" if receipt.outcome != "ok" else "It ended well"
    if receipt.cause:
        how += f" ({receipt.cause.replace('_', ' ')})"
    if receipt.tried:
        how += f", after failed attempts on {', '.join(receipt.tried)}"
    how += "".join(f"; its stream broke on {one.replica} after {one.sent_tokens} tokens" for one in receipt.resumes)
    if receipt.not_resumed:
        how += f"; it did not go on elsewhere ({receipt.not_resumed.replace('_', ' ')})"
    token = "first token of the rest" if receipt.resumes else "first token"
    if waited_s is None or choice is None:
        return f"{how}; nobody saw its {token}."
    over_s = waited_s - choice.expected_s
    against = "as expected"
    if abs(over_s) >= NOTICED_S:
        against = f"{seconds(abs(over_s))} {'later' if over_s > 0 else 'sooner'} than expected"
    within = ""
    if choice.first_token_p99_s is not None and choice.first_token_p90_s is not None:
        inside = [
            word
            for word, limit_s in (("p90", choice.first_token_p90_s), ("p99", choice.first_token_p99_s))
            if waited_s <= limit_s
        ]
        within = f", inside its {inside[0]}" if inside else ", beyond its p99"
    missed = _against_deadline(receipt)
    return f"{how}; the {token} came after {seconds(waited_s)}, {against}{within}{missed}{_regretted(receipt)}."


def _against_deadline(receipt: Receipt) -> str:
    """Whether the first token kept to what the client asked for; both from arrival, as clients count."""
    if receipt.deadline_s is None or receipt.first_token_s is None:
        return ""
    met = "inside" if receipt.first_token_s <= receipt.deadline_s else "after"
    return f", {met} its deadline of {seconds(receipt.deadline_s)}"


def _not_placed(receipt: Receipt) -> str:
    status = f" with status {receipt.status}" if receipt.status is not None else ""
    if receipt.reason is not None:
        return f"{receipt.policy} placed it ({receipt.reason.replace('_', ' ')}) without any estimate to compare."
    return f"It was placed nowhere: the router answered by itself{status}."


def _path(choice: Candidate, prompt_tokens: int) -> str:
    reused = choice.local_tokens + choice.fetched_tokens
    if not reused:
        return f"computing all {prompt_tokens} tokens"
    own = f"{choice.local_tokens} tokens of its own" if choice.local_tokens else ""
    brought = f"{choice.fetched_tokens} tokens fetched ({choice.path})" if choice.fetched_tokens else ""
    parts = " and ".join(part for part in (own, brought) if part)
    return f"reusing {parts} and computing {max(0, prompt_tokens - reused)}"


def _compared(receipt: Receipt, choice: Candidate) -> str:
    other = best_other(receipt)
    if other is None:
        return f"; its first token was expected after {seconds(choice.expected_s)}"
    name = f"{other.replica} ({other.path})"
    sooner_s = other.expected_s - choice.expected_s
    if sooner_s >= -NOTICED_S:
        return (
            f"; its first token was expected after {seconds(choice.expected_s)},"
            f" that of the next best, {name}, after {seconds(other.expected_s)}"
        )
    return (
        f"; {name} was expected to give the first token {seconds(-sooner_s)} sooner"
        f"{_beside_first_token(receipt, choice, other)}"
    )


def _beside_first_token(receipt: Receipt, choice: Candidate, other: Candidate) -> str:
    """What the chosen has for it where it is not the first to answer."""
    saved = {
        "take {} longer to decode": (other.pace_s - choice.pace_s) * (receipt.expected_output_tokens or 0.0),
        "delay later requests by {} more": other.queue_price_s - choice.queue_price_s,
        "delay whoever comes while its queue lasts by {} more": _joining_price_s(receipt, other)
        - _joining_price_s(receipt, choice),
        "lengthen the queue of whoever comes next by {} more": (other.levelling_price_s or 0.0)
        - (choice.levelling_price_s or 0.0),
        "compute {} more while all others wait": 0.0
        if choice.levelling_price_s is None
        else other.compute_s - choice.compute_s,
        "hold up running decodes by {} more": other.decode_price_s - choice.decode_price_s,
    }
    told = [words.format(seconds(value_s)) for words, value_s in saved.items() if value_s >= NOTICED_S]
    return f", but to {' and '.join(told)}" if told else ""


def _joining_price_s(receipt: Receipt, one: Candidate) -> float:
    """Of the delay of later requests the part that some rules count more than the rest, from what the receipt has."""
    if receipt.arrival_rps is None or receipt.mean_compute_s is None:
        return 0.0
    rate_rps = joining_rate_rps(arrival_rps=receipt.arrival_rps, mean_work_s=receipt.mean_compute_s)
    return rate_rps * one.queue_s * one.compute_s


def _regretted(receipt: Receipt) -> str:
    if receipt.regret_s is None or abs(receipt.regret_s) < NOTICED_S:
        return ""
    worse = "more" if receipt.regret_s > 0 else "less"
    return f", {seconds(abs(receipt.regret_s))} {worse} than the best other was expected to take"
