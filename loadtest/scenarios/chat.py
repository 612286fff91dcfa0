"""Conversations of several turns over one shared set of instructions.

Question  does a conversation find its own history again, and how soon does its user read the first word
Seed      `--seed`, 7 by default: user n says the same words after the same pauses in every run
Arrivals  closed loop: each user thinks 5 s on average (exponential) after an answer; `--users` sets the load
Warm-up   20 s, in which first conversations fill the caches; not counted
Pass      95 % of requests within a first token of 1 s and 0.1 s per output token

    locust -f loadtest/scenarios/chat.py --host http://127.0.0.1:30000 --headless -u 30 -t 120 --stop-timeout 60
"""

from loadtest.scenarios.people import ChatPerson
from loadtest.scenarios.user import scenario

scenario("chat", warm_up_s=20.0, pass_good_share=0.95)


class Chat(ChatPerson):
    """As many as `--users`."""
