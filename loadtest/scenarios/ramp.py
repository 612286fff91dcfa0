"""A load that rises until deadlines are missed.

Question  up to which rate are deadlines kept
Seed      `--seed`, 7 by default: the same requests at the same moments in every run
Arrivals  open loop: Poisson at a rate that goes straight from `--from-rate` (0.5/s) to `--to-rate` (10/s) in
          `--for-s` (180)
Warm-up   15 s; not counted
Pass      60 % of all requests within a first token of 2 s and 0.1 s per output token. The report
          has rate and share by tenths of the run: the answer is the last rate before the share falls

    locust -f loadtest/scenarios/ramp.py --host http://127.0.0.1:30000 --headless --to-rate 20
"""

import random
from collections.abc import Iterator

from locust import events, task
from locust.argument_parser import LocustArgumentParser

from loadtest.scenarios.arrivals import ramp
from loadtest.scenarios.goodput import Deadlines
from loadtest.scenarios.open_questions import questions
from loadtest.scenarios.user import Job, OpenLoop, positive, scenario

scenario("ramp", warm_up_s=15.0, pass_good_share=0.6)


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--from-rate", type=positive, default=0.5, help="requests per second (default %(default)s)")
    parser.add_argument("--to-rate", type=positive, default=10.0, help="requests per second (default %(default)s)")
    parser.add_argument("--for-s", type=positive, default=180.0, help="length of the run (default %(default)s)")


events.init_command_line_parser.add_listener(add_options)


class Ramp(OpenLoop):
    """The clock of the ramp."""

    deadlines = Deadlines(first_token_s=2.0, per_token_s=0.1)

    def jobs(self) -> Iterator[Job]:
        given = self.options
        return questions(
            ramp(from_rps=given.from_rate, to_rps=given.to_rate, over_s=given.for_s),
            most_rps=max(given.from_rate, given.to_rate),
            until_s=given.for_s,
            rng=random.Random(f"{given.seed}/ramp"),
            tokens=self.tokens,
            salt=given.salt,
        )

    @task
    def send(self) -> None:
        self.play(self.jobs())
