"""Questions over documents, a few of which are in most prompts.

Question  do the hot documents' states get reused without one replica drowning in them
Seed      `--seed`, 7 by default: user n asks the same over the same documents in every run
Arrivals  closed loop: each user thinks 5 s on average (exponential); `--users` sets the load
Documents 200 of about 1,500 tokens, up to 4 in a prompt, popularity by Zipf with exponent 1.1: the first is in about
          three of five prompts
Warm-up   20 s; not counted
Pass      95 % of requests within a first token of 3 s and 0.1 s per output token

    locust -f loadtest/scenarios/rag.py --host http://127.0.0.1:30000 --headless -u 20 -t 120 --stop-timeout 60
"""

from loadtest.scenarios.people import Reader
from loadtest.scenarios.user import scenario

scenario("rag", warm_up_s=20.0, pass_good_share=0.95)


class Rag(Reader):
    """As many as `--users`."""
