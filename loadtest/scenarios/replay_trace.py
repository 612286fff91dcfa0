"""A trace's requests at its own times, or so many times faster.

Question  what would this deployment have made of that traffic
Seed      none: moments, lengths and what is shared are the trace's; texts follow from its ids and `--salt`
Arrivals  open loop: the trace's moments divided by `--factor`, sent whether or not earlier ones were answered
Warm-up   30 s; not counted
Pass      90 % of requests within a first token of 5 s and 0.1 s per output token

Rows are JSON lines with `at_s` or `timestamp` (ms), `input_length`, `output_length` and `hash_ids` of 512 tokens each,
as Mooncake's traces have them. A prompt has four characters for each token.

    locust -f loadtest/scenarios/replay_trace.py --host http://127.0.0.1:30000 --headless \\
      --trace loadtest/demo/traffic.jsonl.gz --factor 2 --exact-length
"""

from collections.abc import Iterator
from pathlib import Path

from locust import events, task
from locust.argument_parser import LocustArgumentParser

from loadtest.scenarios.goodput import Deadlines
from loadtest.scenarios.prompts import due, read_rows, row_messages
from loadtest.scenarios.user import Job, OpenLoop, positive, scenario

scenario("replay_trace", warm_up_s=30.0, pass_good_share=0.9)


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--trace", default="loadtest/demo/traffic.jsonl.gz", help="default: %(default)s")
    parser.add_argument("--factor", type=positive, default=1.0, help="times as fast as it was (default %(default)s)")
    parser.add_argument("--rows", type=int, help="only the first so many", include_in_web_ui=False)


events.init_command_line_parser.add_listener(add_options)


class Trace(OpenLoop):
    """The clock of the trace."""

    deadlines = Deadlines(first_token_s=5.0, per_token_s=0.1)

    def jobs(self) -> Iterator[Job]:
        options = self.options
        for at_s, row in due(read_rows(Path(options.trace))[: options.rows], options.factor):
            yield at_s, row_messages(row, salt=options.salt, size=options.size), self.tokens(row.output_length)

    @task
    def replay(self) -> None:
        self.play(self.jobs())
