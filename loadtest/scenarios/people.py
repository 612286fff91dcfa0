"""The kinds of users that scenarios are made of: who talks, who asks about documents, who works with tools.

Model     a closed loop: each user asks, reads the answer, thinks or runs a tool, and asks again; so the load follows
          the number of users, and falls when answers come late
Valid     lengths are round numbers of a size that is seen in public traces, times `--size`
Blind to  real texts, pictures and tool calls as the API has them
"""

from __future__ import annotations

from collections.abc import Iterator

from locust import task

from loadtest.scenarios import words
from loadtest.scenarios.goodput import Deadlines
from loadtest.scenarios.prompts import Dialogue, Library, system_text
from loadtest.scenarios.user import AskingUser


class ChatPerson(AskingUser):
    """Talks for some turns, then begins anew. The history grows, and all share one set of instructions."""

    abstract = True
    deadlines = Deadlines(first_token_s=1.0, per_token_s=0.1)
    system_tokens, turn_tokens, answer_tokens = 1000, 60, 200
    mean_turns, mean_think_s = 6.0, 5.0

    def on_start(self) -> None:
        self._talk = self._turns()

    def wait_time(self) -> float:
        return self.rng.expovariate(1.0 / self.mean_think_s)

    @task
    def turn(self) -> None:
        next(self._talk)

    def _turns(self) -> Iterator[None]:
        """One request for each step; an answer that failed ends the conversation."""
        system = system_text("chat", self.tokens(self.system_tokens), salt=self.options.salt)
        while True:
            dialogue = Dialogue(system)
            for _ in range(words.about(self.rng, self.mean_turns)):
                question = words.text(self.rng, words.about(self.rng, self.tokens(self.turn_tokens)))
                limit = words.about(self.rng, self.tokens(self.answer_tokens))
                answer = self.ask(dialogue.ask(question), max_tokens=limit)
                yield
                if answer.error is not None:
                    break
                dialogue.answered("".join(answer.text))


class Reader(AskingUser):
    """Asks single questions over a few documents; some documents are in most of them."""

    abstract = True
    deadlines = Deadlines(first_token_s=3.0, per_token_s=0.1)
    documents, document_tokens, exponent = 200, 1500, 1.1
    most_found, question_tokens, answer_tokens = 4, 40, 150
    mean_think_s = 5.0

    def on_start(self) -> None:
        self._library = Library(count=self.documents, tokens=self.tokens(self.document_tokens), exponent=self.exponent)
        self._system = system_text("rag", self.tokens(300), salt=self.options.salt)

    def wait_time(self) -> float:
        return self.rng.expovariate(1.0 / self.mean_think_s)

    @task
    def question(self) -> None:
        found = self._library.draw(self.rng, self.most_found)
        messages = self._library.question(
            self.rng, found, tokens=self.tokens(self.question_tokens), system=self._system
        )
        self.ask(messages, max_tokens=words.about(self.rng, self.tokens(self.answer_tokens)))


class Agent(AskingUser):
    """Works on tasks: short answers that name a tool, a pause while it runs, its result, and again; a summary last.

    A pause has a long tail: most tools are done at once, some take so long that the prompt's state may be gone.
    """

    abstract = True
    deadlines = Deadlines(first_token_s=2.0, end_s=30.0)
    system_tokens, task_tokens, result_tokens = 3000, 200, 600
    call_tokens, summary_tokens = 60, 400
    mean_steps, median_pause_s, pause_spread = 8.0, 1.5, 1.2

    def on_start(self) -> None:
        self._work = self._steps()

    def wait_time(self) -> float:
        return self.median_pause_s * self.rng.lognormvariate(0.0, self.pause_spread)

    @task
    def step(self) -> None:
        next(self._work)

    def _steps(self) -> Iterator[None]:
        system = system_text("agent", self.tokens(self.system_tokens), salt=self.options.salt)
        while True:
            dialogue = Dialogue(system)
            said = words.text(self.rng, words.about(self.rng, self.tokens(self.task_tokens)))
            left = words.about(self.rng, self.mean_steps)
            while left > 0:
                left -= 1
                limit = self.tokens(self.call_tokens if left > 0 else self.summary_tokens)
                answer = self.ask(dialogue.ask(said), max_tokens=limit)
                yield
                if answer.error is not None:
                    break
                dialogue.answered("".join(answer.text))
                result = words.text(self.rng, words.about(self.rng, self.tokens(self.result_tokens)))
                said = f"Result of the tool: {result}"
