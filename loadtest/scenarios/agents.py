"""Agents that call tools: long instructions, short answers, pauses with a long tail, prompts that grow by results.

Question  is an agent's state still there when its tool is done, and what does a step cost when it is not
Seed      `--seed`, 7 by default: agent n takes the same steps with the same pauses in every run
Arrivals  closed loop: after each step a pause, log-normal with a median of 1.5 s (one in ten is over 7 s)
Warm-up   20 s; not counted
Pass      95 % of steps with a first token within 2 s and over within 30 s

    locust -f loadtest/scenarios/agents.py --host http://127.0.0.1:30000 --headless -u 20 -t 120 --stop-timeout 60
"""

from loadtest.scenarios.people import Agent
from loadtest.scenarios.user import scenario

scenario("agents", warm_up_s=20.0, pass_good_share=0.95)


class Agents(Agent):
    """As many as `--users`."""
