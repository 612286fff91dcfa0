"""Arms compared: intervals, a test that may be looked at, checks of the assignment, words."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from math import isnan, sqrt
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli.main import main
from router.errors import ConfigError
from router.receipts import Receipt
from router.study import sequential
from router.study.ab import Both, Comparison, Rules, comparisons, looks_at
from router.study.ab_page import render
from router.study.balance import mix_p_value, ratio_p_value
from router.study.groups import Floats
from router.study.samples import replicates, sample_of
from tests.router.receipts.builders import a_receipt

QUICK = Rules(replicates=200)


def an_experiment(
    *, units: int = 400, better_by: float = 0.0, seed: int = 1, share: float = 0.5, longer_by: int = 1
) -> list[Receipt]:
    """Sessions of one to six requests; first tokens log-normal, alike within a session; arm b faster by a share."""
    rng = np.random.default_rng(seed)
    receipts: list[Receipt] = []
    for unit in range(units):
        arm = "b" if rng.random() < share else "a"
        own = float(np.exp(0.3 * rng.standard_normal()))
        for _ in range(int(rng.integers(1, 7))):
            first_s = 0.5 * own * float(np.exp(0.4 * rng.standard_normal())) * (1.0 - better_by * (arm == "b"))
            tokens = int(rng.integers(100, 40_000)) * (longer_by if arm == "b" else 1)
            receipts.append(
                a_receipt(
                    len(receipts),
                    arm=arm,
                    arm_share=0.5,
                    unit=f"u{unit}",
                    first_token_s=first_s,
                    ended_s=first_s + 1.0,
                    prompt_tokens=tokens,
                    output_tokens=51,
                    arrived_at=float(rng.random()),
                )
            )
    return sorted(receipts, key=lambda receipt: receipt.arrived_at)


def compared(receipts: list[Receipt], metric: str = "first_token") -> Comparison:
    (found,) = comparisons(receipts, metric, rules=QUICK)
    return found


# Samples


def test_units_of_one_request_have_the_usual_variance_of_a_mean() -> None:
    values = np.random.default_rng(3).exponential(size=50)
    sample = sample_of(values, np.arange(50))
    assert sample.mean_variance == pytest.approx(float(values.var(ddof=1)) / 50, rel=1e-12)


def test_requests_that_are_copies_of_each_other_count_as_one() -> None:
    values = np.random.default_rng(3).exponential(size=50)
    alone, copied = sample_of(values, np.arange(50)), sample_of(np.repeat(values, 4), np.repeat(np.arange(50), 4))
    assert copied.mean_variance == pytest.approx(alone.mean_variance, rel=1e-12)


def test_what_nobody_saw_is_left_out_and_nothing_is_unknown_not_zero() -> None:
    sample = sample_of(np.array([1.0, np.nan, 3.0]), np.array([7, 8, 7]))
    assert (sample.mean, sample.units, isnan(sample.mean_variance)) == (2.0, 1, True)
    nothing = sample_of(np.array([np.nan]), np.array([0]))
    assert all(isnan(value) for value in (nothing.mean, nothing.quantile(0.9), nothing.mean_variance))


def test_replicates_spread_as_the_variance_of_the_mean_says() -> None:
    rng = np.random.default_rng(5)
    unit = np.repeat(np.arange(200), 3)
    sample = sample_of(rng.exponential(size=200)[unit] + rng.exponential(size=600), unit)
    drawn = replicates(sample, (0.5, 0.9), 2000, rng)
    assert drawn[:, 0].std() == pytest.approx(sqrt(sample.mean_variance), rel=0.1)
    assert drawn[:, 0].mean() == pytest.approx(sample.mean, rel=0.01)
    assert np.median(drawn[:, 2]) == pytest.approx(sample.quantile(0.9), rel=0.05)
    assert np.isin(drawn[:, 1:], sample.values).all()


# The test that may be looked at


def false_alarms(look: object, *, experiments: int = 300, looks: int = 60, step: int = 10) -> float:
    """Share of experiments without any difference that are called different at one of many looks."""
    rng = np.random.default_rng(11)
    called = 0
    for _ in range(experiments):
        arms = rng.exponential(size=(2, looks * step)) ** 1.3  # skewed, as first tokens are
        count = np.arange(step, looks * step + 1, step)
        sums, squares = np.cumsum(arms, axis=1)[:, count - 1], np.cumsum(arms**2, axis=1)[:, count - 1]
        means = sums / count
        variance = ((squares / count - means**2) / (count - 1)).sum(axis=0)
        usable = count >= sequential.LEAST_UNITS
        called += bool(look((means[1] - means[0])[usable], variance[usable], means[0][usable]).any())  # type: ignore[operator]
    return called / experiments


def test_looking_sixty_times_calls_no_difference_a_difference_as_rarely_as_promised() -> None:
    """The usual test, looked at as often, does it several times as often as its 5 %."""

    def ours(difference: Floats, variance: Floats, mean: Floats) -> Floats:
        rows = zip(difference, variance, 0.1 * np.abs(mean), strict=True)
        return np.array([sequential.p_value(d, variance=v, tau=t) <= 0.05 for d, v, t in rows])

    def usual(difference: Floats, variance: Floats, mean: Floats) -> Floats:
        return np.asarray(np.abs(difference) > 1.96 * np.sqrt(variance))

    assert false_alarms(ours) <= 0.05
    assert false_alarms(usual) > 0.15


def two_arms(
    rng: np.random.Generator, *, units: int, share: float = 0.5, factor: float = 1.0, rare: bool = False
) -> Both:
    """Units of one to six requests: skewed times, or failures that most units have none of; the arm's by `factor`."""
    of_unit = rng.permutation(np.repeat(np.arange(units), rng.integers(1, 7, units)))
    is_arm = (rng.random(units) < share)[of_unit]
    own = rng.exponential(0.05, units) if rare else np.exp(0.5 * rng.standard_normal(units))
    drawn = rng.random(len(of_unit)) if rare else rng.exponential(size=len(of_unit)) ** 1.3
    scaled = own[of_unit] * np.where(is_arm, factor, 1.0)
    values = (drawn < scaled).astype(np.float64) if rare else drawn * scaled
    return Both(values, of_unit, is_arm, np.zeros(len(values), dtype=np.int64))


@pytest.mark.parametrize(("units", "share", "rare"), [(300, 0.5, False), (700, 0.1, False), (700, 0.1, True)])
def test_arms_without_a_difference_are_rarely_called_different_at_any_look(
    units: int, share: float, rare: bool
) -> None:
    """tau ten times the usual is where the test is quickest to call. The small arm of rare failures is the hard case:
    at first looks it often has none, and variances of each arm by itself call that a difference in one of six."""
    rng = np.random.default_rng(12)
    looks = [looks_at(two_arms(rng, units=units, share=share, rare=rare), Rules(effect=1.0)) for _ in range(150)]
    assert all(looks)
    assert np.mean([each[-1].p_value <= 0.05 for each in looks]) <= 0.05


def test_a_difference_that_one_look_would_nearly_surely_find_is_found_by_most_and_sooner() -> None:
    """A third less time with so many units that one look at the end finds it in 99 of 100 (4.3 standard deviations).

    By theory the test then finds it in 89 of 100 with tau as large as the difference, and in 2 with a tenth of that.
    """
    rng = np.random.default_rng(13)
    runs = [two_arms(rng, units=610, factor=0.7) for _ in range(60)]
    samples = [(both.sample(of_arm=False), both.sample(of_arm=True)) for both in runs]
    off = [(b.mean - a.mean) / sqrt(a.mean_variance + b.mean_variance) for a, b in samples]
    assert np.mean(off) == pytest.approx(-4.3, abs=0.4)
    sharp, dull = ([looks_at(both, Rules(effect=effect)) for both in runs] for effect in (0.3, 0.03))
    assert np.mean([each[-1].p_value <= 0.05 for each in sharp]) >= 0.75
    assert np.mean([each[-1].p_value <= 0.05 for each in dull]) <= 0.2
    needed = [min((one.requests for one in each if one.p_value <= 0.05), default=each[-1].requests) for each in sharp]
    assert np.mean([have / len(both.values) for have, both in zip(needed, runs, strict=True)]) < 0.75


def test_an_arm_that_always_fails_beside_one_that_never_does_is_called_worse_but_not_for_certain() -> None:
    arms = np.arange(80) % 2 == 1
    (*_, last) = looks_at(Both(arms.astype(float), np.arange(80), arms, np.zeros(80, dtype=np.int64)), Rules())
    assert 0.0 < last.p_value < 0.05
    assert 0.0 < last.low < 1.0 < last.high


@given(st.floats(-10, 10), st.floats(1e-6, 100), st.floats(1e-3, 10), st.floats(0.001, 0.5))
def test_the_interval_leaves_out_zero_exactly_when_the_p_value_is_small(
    difference: float, variance: float, tau: float, alpha: float
) -> None:
    half = sequential.half_width(variance=variance, tau=tau, alpha=alpha)
    p = sequential.p_value(difference, variance=variance, tau=tau)
    if abs(abs(difference) - half) > 1e-6 * half:
        assert (abs(difference) > half) == (p < alpha)


def test_the_interval_is_wider_than_that_of_a_single_look_and_shrinks_with_the_variance() -> None:
    single = NormalDist().inv_cdf(0.975)
    halves = [sequential.half_width(variance=v, tau=1.0, alpha=0.05) for v in (1.0, 0.1, 0.01)]
    assert halves == sorted(halves, reverse=True)
    assert all(half > single * sqrt(v) for half, v in zip(halves, (1.0, 0.1, 0.01), strict=True))


# Checks of the assignment


def test_the_sample_ratio_has_the_p_value_of_the_binomial() -> None:
    """Normal approximation against the exact sum, near the middle of 1000 tosses."""
    tosses = np.random.default_rng(2).binomial(1000, 0.5, size=200_000)
    exact = float(np.mean(np.abs(tosses - 500) >= 40))
    assert ratio_p_value({"a": 460, "b": 540}, {"a": 1.0, "b": 1.0}) == pytest.approx(exact, rel=0.15)
    assert ratio_p_value({"a": 100, "b": 900}, {"a": 0.1, "b": 0.9}) == pytest.approx(1.0)
    assert isnan(ratio_p_value({"a": 10}, {"a": 1.0}))


def test_the_mix_check_sees_longer_prompts_in_one_arm_and_little_in_chance() -> None:
    rng = np.random.default_rng(4)
    units, arms = np.repeat(np.arange(200), 3), rng.integers(0, 2, 200)
    alike = rng.integers(0, 4, 600)
    longer = np.minimum(alike + arms[units] * (rng.random(600) < 0.5), 3)
    assert mix_p_value(alike.tolist(), units, arms, rng) > 0.01
    assert mix_p_value(longer.tolist(), units, arms, rng) < 0.01
    assert isnan(mix_p_value([0, 1], np.array([0, 1]), np.array([1, 1]), rng))


# Verdicts


def test_a_faster_arm_is_called_faster_with_an_interval_that_holds_the_truth() -> None:
    found = compared(an_experiment(units=800, better_by=0.25))
    assert found.decided
    assert found.looks[-1].low < -0.25 * 0.5 < found.looks[-1].high < 0.0
    assert "b has" in found.verdict
    assert "so b is the better" in found.verdict
    assert all(each.difference < 0 for each in found.differences)


def test_alike_arms_are_not_called_different() -> None:
    found = compared(an_experiment(units=800))
    assert not found.decided
    assert "No difference of b and a in mean first token has been shown" in found.verdict


def test_twice_as_many_units_as_meant_make_every_difference_void() -> None:
    found = compared(an_experiment(units=400, better_by=0.3, share=0.7))
    assert found.ratio_p_value < 1e-6
    assert "cannot be compared" in found.verdict


def test_a_mix_of_lengths_that_differs_is_said_with_the_verdict() -> None:
    found = compared(an_experiment(units=400, longer_by=4))
    assert found.mix_p_value < 0.01
    assert "prompts of different lengths" in found.verdict


def test_too_few_units_say_nothing() -> None:
    found = compared(an_experiment(units=20))
    assert found.looks == []
    assert "Nothing can be said" in found.verdict


def test_bootstrap_intervals_of_mean_and_median_hold_a_true_difference_about_as_often_as_they_say() -> None:
    """60 experiments at 95 %: 51 or fewer would happen less than once in a hundred such tests."""
    held = np.zeros(2)
    for seed in range(60):
        mean, median = compared(an_experiment(units=120, better_by=0.2, seed=seed)).differences[:2]
        typical = 0.5 * np.exp((0.3**2 + 0.4**2) / 2)
        held += [mean.low < -0.2 * typical < mean.high, median.low < -0.2 * 0.5 < median.high]
    assert (held >= 52).all()


def test_requests_that_chose_their_policy_or_are_there_for_their_end_do_not_take_part() -> None:
    receipts = an_experiment(units=100)
    extra = [a_receipt(10_000 + n, arm="b", first_token_s=99.0, override=True) for n in range(50)]
    extra += [a_receipt(20_000 + n, arm="b", first_token_s=99.0, sampled=False) for n in range(50)]
    assert compared(receipts + extra) == compared(receipts)


def test_failures_are_a_metric_too() -> None:
    receipts = an_experiment(units=200)
    for index, receipt in enumerate(receipts):
        if receipt.arm == "b" and index % 2:
            receipt.outcome = "failed"
    found = compared(receipts, "failures")
    assert found.differences[0].arm == pytest.approx(0.5, abs=0.1)
    assert "so a is the better" in found.verdict


def test_after_a_change_of_shares_only_requests_under_the_new_ones_are_compared() -> None:
    old, new = an_experiment(units=150, seed=2), an_experiment(units=300, better_by=0.4, share=0.75, seed=3)
    for one in new:
        one.arm_share = 0.75 if one.arm == "b" else 0.25
        one.arrived_at += 1.0
    found = compared(old + new)
    assert found.before_change == len(old)
    assert f"last changed are left out: {len(old)}." in render([found])
    assert msgspec.structs.replace(found, before_change=0) == compared(new)
    assert "so b is the better" in found.verdict


def test_an_experiment_without_any_failure_does_not_claim_to_know_how_rare_they_are() -> None:
    said = compared(an_experiment(units=200), "failures").verdict
    assert "it is 0 % throughout, which does not say how rare anything else is" in said
    assert "between" not in said
    assert all(isnan(each.low) for each in compared(an_experiment(units=200), "failures").differences)


def test_answers_that_do_not_say_their_tokens_have_no_pace_to_compare_and_the_verdict_says_what_asks_for_them() -> None:
    receipts = an_experiment(units=100)
    for receipt in receipts:
        receipt.output_tokens = None
    assert "inject_usage" in compared(receipts, "per_token").verdict
    for receipt in receipts:
        receipt.outcome = "failed" if receipt.arm == "b" else "ok"
    assert "no answer that ended well" in compared(receipts).verdict


@pytest.mark.parametrize(
    ("arms", "metric", "control", "says"),
    [
        (("a",), "first_token", None, "two arms are needed, and these receipts have a"),
        ((None,), "first_token", None, "have none"),
        (("a", "b"), "first_token", "c", "no arm 'c'"),
        (("a", "b"), "speed", None, "no metric 'speed'"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_sentence(
    arms: tuple[str | None, ...], metric: str, control: str | None, says: str
) -> None:
    receipts = [a_receipt(index, arm=arm) for index, arm in enumerate(arms)]
    with pytest.raises(ConfigError, match=says):
        comparisons(receipts, metric, control)


# What is shown


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_from_outside_and_escapes_names() -> None:
    receipts = an_experiment(units=80)
    for receipt in receipts:
        receipt.arm = {"a": "<a>", "b": "b & c"}[receipt.arm or ""]
    page = render(comparisons(receipts, rules=QUICK))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<svg") == 2
    assert "<a>" not in page.replace("&lt;a&gt;", "")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_command_prints_a_verdict_and_writes_page_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "r.jsonl", tmp_path / "ab.html"
    lines = [msgspec.json.encode(one) for one in an_experiment(units=120, better_by=0.4)]
    path.write_bytes(b"\n".join([*lines, b"cut of", lines[0][:40]]))
    assert main(["ab", str(path), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "so b is the better" in out
    assert "2 lines are no receipts and were passed over" in out
    assert "so b is the better" in page.read_text()
    assert main(["ab", str(path), "--json", "--metric", "end_to_end"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["metric"] == "end_to_end"
    assert main(["ab", str(path), "--control", "z"]) == 2


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "r.jsonl", tmp_path / "ab.png"
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in an_experiment(units=80)))
    assert main(["ab", str(path), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in an_experiment(units=80)))
    for name, says in (("ab.shape", "'shape' is not supported"), ("absent/ab.png", "No such file")):
        assert main(["ab", str(path), "--png", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert len(said.splitlines()) == 1
