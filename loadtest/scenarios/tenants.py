"""Three tenants on one fleet: people who wait, agents, and a batch that nobody waits for.

Question  what do the impatient feel of the others, and does the batch get what is left
Seed      `--seed`, 7 by default
Arrivals  closed loop: of 10 users 5 talk, 3 are agents, and 2 read without a pause. Each sends its tenant's name
          in the field `--tenant-header` names
Warm-up   20 s; not counted
Pass      90 % of all requests within the deadlines of their tenant: a first token within 1 s for who talks and 2 s
          for agents, an end within 60 s for the batch

    locust -f loadtest/scenarios/tenants.py --host http://127.0.0.1:30000 --headless -u 30 -t 120 --stop-timeout 60
"""

from loadtest.scenarios.goodput import Deadlines
from loadtest.scenarios.people import Agent, ChatPerson, Reader
from loadtest.scenarios.user import scenario

scenario("tenants", warm_up_s=20.0, pass_good_share=0.9)


class Talks(ChatPerson):
    weight = 5
    tenant = "interactive"


class Works(Agent):
    weight = 3
    tenant = "agents"


class Batch(Reader):
    weight = 2
    tenant = "batch"
    deadlines = Deadlines(end_s=60.0)
    answer_tokens = 500

    def wait_time(self) -> float:
        return 0.0
