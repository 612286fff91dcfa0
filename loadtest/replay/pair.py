"""Two tasks and one link: sending a request to an idle replica can end it sooner and everything later.

Model     replica `busy` computes a long prompt whose history comes layer by layer from the shared store; then the
          target arrives. Its own history is in the memory of `busy` and in the store.
          Cache first: it goes to `busy`, fetches nothing and queues behind the long prefill.
          Idle first: it goes to `idle`, starts at once and fetches its history over the store's link, which it
          shares fairly with the other task's fetch. That fetch then ends later, and with it the other task
Valid     the simulated engines without jitter; both tasks end with their first token; times from the target's arrival
Blind to  routing: the two placements are given, no policy chooses them
Source    the order and the three times of the textbook's section 9.5.4 (1.38 s; 0.33 s and 1.54 s). It gives the
          outcome only: the inputs here are chosen, docs/bounds.md says how
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sim_backends import fleet as fleet_file
from sim_backends.fleet import Fleet
from sim_backends.requests import EngineRequest
from sim_backends.world import World, build

# Two A100 and a store behind 25 Gbit/s, shared by both.
FLEET = """
model: {name: Qwen/Qwen3-8B, layers: 36, hidden: 4096, intermediate: 12288, heads: 32, kv_heads: 8, head_dim: 128,
  vocab: 151936}
block_tokens: 16
cards:
  A100: {peak_tflops: 312, memory_gb_s: 2039, memory_gib: 80}
links:
  store: {gb_s: 3.125, start_ms: 10}
  pcie: {gb_s: 25}
fetch: {discipline: layerwise}
store: {capacity_gib: 512, network: store, host: pcie}
engine: {jitter: 0}
replicas:
  - {name: busy, card: A100}
  - {name: idle, card: A100}
"""

BUSY, IDLE = 0, 1


@dataclass(frozen=True, slots=True)
class Task:
    """history_tokens : of the prompt, known to the store; new_tokens : to be computed in any case, >= 1."""

    history_tokens: int
    new_tokens: int
    first_token_id: int  # prompts of consecutive ids from here: tasks with ids far apart share nothing

    def history(self) -> list[int]:
        return list(range(self.first_token_id, self.first_token_id + self.history_tokens))

    def prompt(self) -> list[int]:
        end = self.first_token_id + self.history_tokens + self.new_tokens
        return list(range(self.first_token_id, end))


@dataclass(frozen=True, slots=True)
class Pair:
    """The inputs. lead_s : how long before the target the other task reaches `busy`, >= 0."""

    target: Task = Task(history_tokens=3072, new_tokens=64, first_token_id=1_000)
    other: Task = Task(history_tokens=27_648, new_tokens=5_248, first_token_id=50_000)
    lead_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ends of both tasks, seconds from the target's arrival."""

    target_s: float
    other_s: float

    @property
    def all_s(self) -> float:
        return max(self.target_s, self.other_s)


def play(pair: Pair, *, target_row: int, fleet: Fleet | None = None) -> Outcome:
    """Both tasks to their ends, the target on replica `target_row`, the other one on `BUSY`."""
    world = build(fleet or fleet_file.parse(FLEET, source="the pair's fleet"))
    start_s = _remember_histories(world, pair)
    arrival_s = start_s + pair.lead_s
    world.submit(BUSY, _request("other", pair.other.prompt()), start_s)
    world.submit(target_row, _request("target", pair.target.prompt()), arrival_s)
    ends_s = _run_out(world)
    return Outcome(target_s=ends_s["target"] - arrival_s, other_s=ends_s["other"] - arrival_s)


def _remember_histories(world: World, pair: Pair) -> float:
    """Compute both histories, the other task's on `idle`, which then starts anew with empty memory; time after it.

    What is computed is written through to the store, so that it has both histories; `busy` keeps the target's.
    """
    world.submit(BUSY, _request("target-history", pair.target.history()), 0.0)
    world.submit(IDLE, _request("other-history", pair.other.history()), 0.0)
    end_s = max(_run_out(world).values())
    emptied = world.engines[IDLE].reset_prefix_cache()
    assert emptied, "nothing runs on `idle` any more"
    return end_s + 1.0


def _request(name: str, tokens: list[int]) -> EngineRequest:
    return EngineRequest(name, tokens, max_tokens=1, output_tokens=1)


def _run_out(world: World) -> dict[str, float]:
    """Time of each request's last token, until nothing is left to do."""
    ends_s: dict[str, float] = {}
    while (due_s := world.next_due_s()) is not None:
        for output in world.advance(due_s):
            if output.finish_reason is not None:
                ends_s[output.request_id] = output.at_s
    return ends_s


def table(pair: Pair) -> Table:
    """Both placements as rows."""
    shown = Table("target goes to", "target ends, s", "other ends, s", "all end, s", title="Two tasks, one link")
    for name, row in (("cache first: busy", BUSY), ("idle first: idle", IDLE)):
        outcome = play(pair, target_row=row)
        shown.add_row(name, f"{outcome.target_s:.3f}", f"{outcome.other_s:.3f}", f"{outcome.all_s:.3f}")
    return shown


def main() -> None:
    """`python -m loadtest.replay.pair`"""
    Console().print(table(Pair()))


if __name__ == "__main__":
    main()
