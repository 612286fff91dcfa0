"""The `tfirst` command: one parser, subcommands found by entry point."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import router
from router.cli.screen import printable
from router.errors import ConfigError, RouterError
from router.plugins import COMMANDS, found


class Command(Protocol):
    """What an entry point of group `tfirst.commands` names."""

    name: str
    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit status."""
        ...


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, every installed subcommand included."""
    parser = argparse.ArgumentParser(
        prog="tfirst",
        description="Routes each LLM request to the replica and path that serve it first, and can say why.",
        epilog="Start with `tfirst serve --worker-urls http://127.0.0.1:8001 http://127.0.0.1:8002`.",
    )
    parser.add_argument("--version", action="version", version=f"tfirst {router.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for point in found(COMMANDS).values():
        command: Command = point.load()
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status 2: wrong usage or configuration; 1: it could not be done."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except ConfigError as exc:
        print(f"tfirst: {printable(str(exc))}", file=sys.stderr)
        return 2
    except RouterError as exc:
        print(f"tfirst: {printable(str(exc))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
