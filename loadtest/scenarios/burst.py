"""A steady load that is several times higher for a few seconds, again and again.

Question  how far do first tokens fall behind in a burst, and are they back before the next
Seed      `--seed`, 7 by default: the same requests at the same moments in every run
Arrivals  open loop: Poisson at `--rate` (2/s), times `--burst-factor` (5) in the last `--burst-for-s` (5) of each
          `--burst-every-s` (30), for `--for-s` (120)
Warm-up   30 s, the first burst; not counted
Pass      90 % of requests within a first token of 2 s and 0.1 s per output token

    locust -f loadtest/scenarios/burst.py --host http://127.0.0.1:30000 --headless --rate 4
"""

import random
from collections.abc import Iterator

from locust import events, task
from locust.argument_parser import LocustArgumentParser

from loadtest.scenarios.arrivals import bursts
from loadtest.scenarios.goodput import Deadlines
from loadtest.scenarios.open_questions import questions
from loadtest.scenarios.user import Job, OpenLoop, positive, scenario

scenario("burst", warm_up_s=30.0, pass_good_share=0.9)


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--rate", type=positive, default=2.0, help="requests per second (default %(default)s)")
    parser.add_argument("--burst-factor", type=positive, default=5.0, help="1 or more (default %(default)s)")
    parser.add_argument("--burst-every-s", type=positive, default=30.0, help="default: %(default)s")
    parser.add_argument("--burst-for-s", type=positive, default=5.0, help="default: %(default)s")
    parser.add_argument("--for-s", type=positive, default=120.0, help="length of the run (default %(default)s)")


events.init_command_line_parser.add_listener(add_options)


class Burst(OpenLoop):
    """The clock of the bursts."""

    deadlines = Deadlines(first_token_s=2.0, per_token_s=0.1)

    def jobs(self) -> Iterator[Job]:
        given = self.options
        rate = bursts(
            base_rps=given.rate, factor=given.burst_factor, every_s=given.burst_every_s, for_s=given.burst_for_s
        )
        return questions(
            rate,
            most_rps=given.rate * max(1.0, given.burst_factor),
            until_s=given.for_s,
            rng=random.Random(f"{given.seed}/burst"),
            tokens=self.tokens,
            salt=given.salt,
        )

    @task
    def send(self) -> None:
        self.play(self.jobs())
