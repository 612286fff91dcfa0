"""All kinds of users together, or those that are named on the command line.

Question  how does a deployment bear a bit of everything; with names (`Chat`, `Rag`, `Agents`) some of it
Seed      `--seed`, 7 by default
Arrivals  closed loop: each user waits after each answer, 5 s on average, agents less; `--users` sets the load
Warm-up   20 s; not counted
Pass      90 % of requests within the deadlines of their kind of user

    locust -f loadtest/locustfile.py --host http://127.0.0.1:30000                # with a page at :8089
    locust -f loadtest/locustfile.py --host http://127.0.0.1:30000 --headless -u 30 -t 120 --stop-timeout 60 Chat Rag

Scenarios with a question of their own are in `loadtest/scenarios/`.
"""

from loadtest.scenarios.people import Agent, ChatPerson, Reader
from loadtest.scenarios.user import scenario

scenario("mix", warm_up_s=20.0, pass_good_share=0.9)


class Chat(ChatPerson):
    weight = 3


class Rag(Reader):
    weight = 2


class Agents(Agent):
    weight = 1
