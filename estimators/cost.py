"""What a request costs in money on each replica by each path, and what minimising each number would do.

Model     GPU-seconds = prefill + its share of the decode steps it takes part in; money = GPU-seconds x price of the
          replica's time, plus bytes fetched x price of the link where that is priced
          per good answer  money / P(good): every second is paid as used, and a bad answer is paid and worth nothing
          net loss         money x busy share - value x P(good): the cards are paid anyway, idle seconds are free
Valid     shares of one replica's steps sum to the steps; prices of one currency, here USD
Blind to  memory held while waiting; cards kept as a reserve: what a fleet costs is `fleet_per_thousand_usd`
Source    textbook sections 9.2.3 (GPU-seconds per request) and 9.7.2 (cost per good answer)

Arrays broadcast to (replicas, paths). A price that is not known is NaN and so is everything made of it: see
`unpriced_last`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Values = npt.NDArray[np.float64]  # any shape that broadcasts to (replicas, paths)

SECONDS_PER_HOUR = 3600.0
GB = 1e9
GOOD_FLOOR = 0.01  # below this nobody knows a probability; keeps a hopeless candidate comparable


def decode_share_s(*, shared_step_s: Values, own_step_s: Values, decode_batch: Values, output_tokens: float) -> Values:
    """GPU-seconds of decode steps that are this request's.

    The weights are read once for the whole batch, so each request carries an equal part; its own KV it carries alone.

    Parameters
    ----------
    shared_step_s : the part of a step that does not grow with this request: reading the weights, > 0
    own_step_s : what this request adds to each step: reading its KV at its mean context, >= 0
    decode_batch : decodes running beside it, >= 0
    output_tokens : expected output, >= 0

    Minimising this alone fills the fullest replica, where the weights are shared by most, until its KV space is gone.
    """
    require(0 <= output_tokens < float("inf"), "output_tokens", output_tokens)
    return np.asarray(output_tokens * (shared_step_s / (decode_batch + 1.0) + own_step_s))


def gpu_seconds(*, compute_s: Values, decode_s: Values | float, held_s: Values | float = 0.0) -> Values:
    """Seconds of a replica's GPUs this request takes there, as if nothing else wanted them.

    Parameters
    ----------
    compute_s : C, the prefill that is left on this path, >= 0
    decode_s : its share of the decode steps, see `decode_share_s`, >= 0
    held_s : time the GPU stands still for a blocking fetch, >= 0; zero where a fetch overlaps other work

    Minimising this follows the cache and the fastest card. It is the load a choice adds to the fleet, whatever it
    costs, and lowest total load is not shortest wait: it queues everything behind one warm replica.
    """
    return np.asarray(compute_s + decode_s + held_s)


def money_usd(
    *, gpu_s: Values, usd_per_hour: Values, fetched_bytes: Values | float = 0.0, usd_per_gb: float | None = None
) -> Values:
    """Money one request takes, USD.

    Parameters
    ----------
    gpu_s : seconds of the replica, see `gpu_seconds`, >= 0
    usd_per_hour : price of the whole replica, all its cards together, >= 0; NaN unknown
    fetched_bytes : bytes fetched on this path, >= 0
    usd_per_gb : price of a gigabyte (10^9 bytes) over that link, >= 0; None: the link is not priced, and a fetch costs
        only the time it takes

    Minimising this sends all to the card with the cheapest work, not the cheapest hour, and lets requests wait there
    for ever: waiting is free in it. It is right only for batch work on cards rented by the second. It fetches rather
    than recomputes whenever the link is not priced.
    """
    money = np.asarray(gpu_s * usd_per_hour / SECONDS_PER_HOUR)
    if usd_per_gb is None:
        return money
    require(0 <= usd_per_gb < float("inf"), "usd_per_gb", usd_per_gb)
    return np.asarray(money + fetched_bytes * (usd_per_gb / GB))


def per_thousand_usd(money: Values) -> Values:
    """The same for a thousand such requests: the unit prices are quoted in. Ranks as `money_usd` does."""
    return np.asarray(1000.0 * money)


def good_probability(*, meets_deadline: Values, quality: Values | float = 1.0) -> Values:
    """Probability that an answer counts: in time, and of the quality wanted; taken to be independent.

    meets_deadline, quality : 0..1; a quality below one is that of a replica with, say, harder quantised weights.
    """
    return np.asarray(meets_deadline * quality)


def per_good_usd(*, money: Values, good: Values) -> Values:
    """Money per answer that counts, USD: money / P(good), the probability floored at 0.01.

    Parameters
    ----------
    money : see `money_usd`, >= 0
    good : see `good_probability`, 0..1

    Minimising this is the rule for cards rented by the second: of two candidates in time it takes the cheaper, and a
    late one must be cheaper by as much as it is less likely. On reserved cards it leaves a fast, dear card idle
    although its seconds are paid, so use `net_loss_usd` there. When no candidate can be in time all are floored alike
    and the cheapest wins: an answer nobody wants is at least not dear. The smallest ratio for each request is not the
    smallest ratio of the sums: a fleet's cost per good answer is smallest under `net_loss_usd` with that cost as the
    value.
    """
    return np.asarray(money / np.maximum(good, GOOD_FLOOR))


def net_loss_usd(*, money: Values, good: Values, value_usd: float, busy_share: Values | float = 1.0) -> Values:
    """What a choice loses, USD; negative when it earns: busy_share x money - value x P(good).

    Parameters
    ----------
    money : see `money_usd`, >= 0
    good : see `good_probability`, 0..1
    value_usd : what an answer that counts is worth, >= 0
    busy_share : share of the replica's seconds that another request would otherwise use, 0..1, such as its
        utilisation; 1 when every second is rented as used, 0 when the cards are paid and idle

    Minimising this on reserved cards takes, at busy share 0, whatever most likely makes the deadline at any price:
    an idle fast card is used. As the fleet fills, seconds cost what they displace and requests that gain little from
    a dear card leave it. With value 0 it is `money_usd`; with a large one it is the most probable deadline. With busy
    share 1 and the fleet's own cost per good answer as value it makes that cost smallest (Dinkelbach 1967).
    """
    require(0 <= value_usd < float("inf"), "value_usd", value_usd)
    return np.asarray(busy_share * money - value_usd * good)


def unpriced_last(cost: Values) -> Values:
    """The same with infinity for NaN, so that a search for the smallest never takes a price nobody knows.

    When all are unknown they tie, and the rule that asks has to fall back on `gpu_seconds`.
    """
    return np.where(np.isnan(cost), np.inf, cost)


def fleet_per_thousand_usd(*, usd_per_hour: float, finished_rps: float, good_share: float = 1.0) -> float:
    """What a thousand answers that count have cost: all that was paid over all that counted, idle and lost included.

    Parameters
    ----------
    usd_per_hour : price of the whole fleet, > 0, in use or not
    finished_rps : requests finished per second, > 0; not what the fleet could finish
    good_share : of them, the share that counts, 0 < share <= 1

    >>> round(fleet_per_thousand_usd(usd_per_hour=8.0, finished_rps=3.5), 2)
    0.63
    """
    require(0 < usd_per_hour < float("inf"), "usd_per_hour", usd_per_hour)
    require(0 < finished_rps < float("inf"), "finished_rps", finished_rps)
    require(0 < good_share <= 1, "good_share", good_share)
    return 1000.0 * usd_per_hour / (SECONDS_PER_HOUR * finished_rps * good_share)
