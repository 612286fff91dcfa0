"""`tfirst sim`: play a fleet of simulated vLLM or SGLang replicas until told to end."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from sim_backends import fleet as fleet_file
from sim_backends.cluster import Cluster, ClusterSettings
from sim_backends.faults import BadFault, Faults, faults_of_options
from sim_backends.fleet import BadFleet, Fleet
from sim_backends.generations import DEFAULT, GENERATIONS
from sim_backends.publisher import PortTaken

_DEFAULT_REPLICAS = 4
_DEFAULT_CARDS = "A100,H20"
_EXIT_FAILED = 1
_EXIT_USAGE = 2

_DESCRIPTION = """\
Play a fleet of simulated vLLM (or SGLang) replicas: real HTTP, real cache events, simulated GPUs.

Each replica listens on its own port and behaves as a vLLM server with prefix caching: continuous batching,
chunked prefill, a block cache of the card's size, cache events over ZMQ with replay, and one shared KV store
that the engines look up by themselves. Bodies may carry `sim_output_tokens` to say how long the answer runs.
"""

_EPILOG = """\
examples:
  tfirst sim                                  two A100 and two H20 on ports 8001 to 8004
  tfirst sim --replicas 8 --cards H20         eight H20 on ports 8001 to 8008
  tfirst sim --speed 8 --write-fleet f.yaml   hardware eight times faster; f.yaml is what `tfirst serve` reads
  tfirst sim --fleet my-fleet.yaml --port 0   the replicas of a file, on ports the system gives
  tfirst sim --events sglang-0.5.23           replicas that speak, publish and report as SGLang does
  tfirst sim --fault a100-0:error_share=0.2 --fault a100-0:retry_after_s=1 --fault event_delay_s=0.5
                                              a fifth of one replica's answers are 503; all events come late
  tfirst sim --fault a100-0:restart_after_s=60 --fault a100-0:restart_down_s=5
                                              after a minute one replica is gone for 5 s and comes back empty
"""


class _UsageError(ValueError):
    """Options that do not go together, in one sentence."""


class _FleetNotWritten(OSError):
    def __init__(self, path: Path, reason: str | None) -> None:
        super().__init__(f"{path} cannot be written: {reason}")


def _positive(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


class SimCommand:
    """The subcommand as the `tfirst` entry point finds it."""

    name = "sim"
    help = "play a fleet of simulated vLLM replicas"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's options to its parser."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = _DESCRIPTION
        parser.epilog = _EPILOG
        fleet = parser.add_argument_group("the fleet")
        fleet.add_argument(
            "--fleet",
            type=Path,
            metavar="FILE",
            help="play the replicas of this fleet file (then without the next two)",
        )
        fleet.add_argument(
            "--replicas",
            type=_positive(int, "a count of at least 1"),
            metavar="N",
            help="how many replicas (default 4)",
        )
        fleet.add_argument(
            "--cards",
            metavar="A,B",
            help=f"cards, in equal runs in this order (default {_DEFAULT_CARDS}: the first half A100, the rest H20)",
        )
        fleet.add_argument(
            "--speed",
            type=_positive(float, "a factor above 0"),
            metavar="X",
            help="hardware so many times faster: peaks and rates up, fixed times down (default 1, or the file's)",
        )
        fleet.add_argument("--seed", type=int, metavar="N", help="of all chance: jitter and output lengths (default 0)")
        fleet.add_argument("--no-store", action="store_true", help="without the shared KV store")
        where = parser.add_argument_group("where it listens and what it says")
        where.add_argument(
            "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default %(default)s)"
        )
        where.add_argument(
            "--port",
            type=_port,
            default=8001,
            metavar="BASE",
            help="port of the first replica, the next ones count up; 0 lets the system choose (default %(default)s); "
            "addresses in a fleet file come first",
        )
        where.add_argument(
            "--write-fleet",
            type=Path,
            metavar="FILE",
            help="once everything listens, write the fleet with all addresses filled in",
        )
        where.add_argument(
            "--events",
            choices=list(GENERATIONS),
            default=DEFAULT.name,
            metavar="RELEASE",
            help=f"engine and release the replicas speak as: {', '.join(GENERATIONS)} (default %(default)s)",
        )
        where.add_argument(
            "--raw-hashes",
            action="store_true",
            help="block hashes as whole digests in bytes (vLLM's VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)",
        )
        where.add_argument("--no-events", action="store_true", help="without cache events over ZMQ")
        where.add_argument(
            "--no-prompt-tokens-details",
            action="store_true",
            help="leave cached_tokens out of usage, as a vLLM server does by default",
        )
        wrong = parser.add_argument_group("what goes wrong")
        wrong.add_argument(
            "--fault",
            action="append",
            default=[],
            metavar="[REPLICA:]NAME=VALUE",
            help="a fault of one replica or of all, from the start; may be repeated, later ones win. Also on each "
            f"replica's /sim/faults. Names: {', '.join(Faults.__struct_fields__)}",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Play until SIGINT or SIGTERM. 0 after a clean end, 1 if it cannot start, 2 for a bad fleet or options."""
        try:
            fleet = _fleet_of(args)
            faults = faults_of_options(args.fault, [replica.name for replica in fleet.replicas])
            generation = GENERATIONS[args.events]
            if generation.is_sglang and any(replica.ranks > 1 for replica in fleet.replicas):
                raise _UsageError(f"--events {generation.name} plays one rank behind each URL; the fleet has more")
            if args.raw_hashes and not generation.can_send_raw_hashes:
                raise _UsageError(f"--raw-hashes does not go with --events {generation.name}, which has numbers only")
        except (BadFleet, BadFault, _UsageError) as exc:
            return _say(str(exc), _EXIT_USAGE)
        settings = ClusterSettings(
            host=args.host,
            port=args.port,
            seed=args.seed,
            use_store=not args.no_store,
            use_events=not args.no_events,
            prompt_tokens_details=not args.no_prompt_tokens_details,
            generation=generation,
            raw_hashes=args.raw_hashes,
            faults=faults,
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_play(fleet, settings, args.write_fleet))
        except (PortTaken, _FleetNotWritten) as exc:
            return _say(str(exc), _EXIT_FAILED)
        except KeyboardInterrupt:  # before the handlers were in place
            return 0
        return 0


COMMAND = SimCommand()


def _say(sentence: str, status: int) -> int:
    print(f"tfirst sim: {sentence}", file=sys.stderr)
    return status


def _fleet_of(args: argparse.Namespace) -> Fleet:
    if args.fleet is not None:
        if args.replicas is not None or args.cards is not None:
            raise _UsageError("--replicas and --cards do not go with --fleet: the file lists its replicas")
        fleet = fleet_file.read(args.fleet)
        return fleet if args.speed is None else msgspec.structs.replace(fleet, speed=args.speed)
    cards = [card.strip() for card in (args.cards or _DEFAULT_CARDS).split(",")]
    replicas = args.replicas or _DEFAULT_REPLICAS
    if len(cards) > replicas:
        if args.cards is not None:
            raise _UsageError(f"--cards names {len(cards)} cards for {replicas} replicas")
        cards = cards[:replicas]
    return fleet_file.built(replicas=replicas, cards=cards, speed=args.speed or 1.0)


def _write(fleet: Fleet, path: Path) -> None:
    try:
        fleet_file.write(fleet, path)
    except OSError as exc:
        raise _FleetNotWritten(path, exc.strerror) from exc


async def _play(fleet: Fleet, settings: ClusterSettings, write_fleet: Path | None) -> None:
    loop = asyncio.get_running_loop()
    told_to_end = loop.create_future()

    def end() -> None:
        if not told_to_end.done():
            told_to_end.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    cluster = Cluster(fleet, settings)
    await cluster.start()
    try:
        if write_fleet is not None:
            _write(cluster.fleet, write_fleet)
        for replica in cluster.fleet.replicas:
            print(f"{replica.name:<12} {replica.card:<8} {replica.url}  events {replica.events or 'off'}", flush=True)
        await asyncio.wait((told_to_end, cluster.broken), return_when=asyncio.FIRST_COMPLETED)
        if cluster.broken.done():
            cluster.broken.result()
    finally:
        await cluster.stop()
