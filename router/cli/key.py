"""`tfirst key`: make keys for clients, and the lines that let them in."""

from __future__ import annotations

import argparse
import sys

from router.errors import ConfigError
from router.keys import key_line, new_key


class KeyCommand:
    name = "key"
    help = "make a key for a client, and its line for the file that `client_keys` names"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Exit status: 0, or 2 for a name or a key that cannot be used."
        what = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
        new = what.add_parser(
            "new",
            help="print a new key, on standard error, and its line, on standard output",
            description="Prints a new key on standard error, once, and its line on standard output:"
            " `tfirst key new alice >> keys.txt` shows the key and keeps the line.",
        )
        line = what.add_parser(
            "line",
            help="read an existing key from standard input and print its line",
            description="Reads a key from standard input, never from an argument, and prints its line.",
        )
        new.set_defaults(make=True)
        line.set_defaults(make=False)
        for each in (new, line):
            each.add_argument("client", metavar="NAME", help="whose it is: letters, digits, '.', '_' and '-'")

    def run(self, args: argparse.Namespace) -> int:
        key = new_key() if args.make else sys.stdin.readline().strip()
        try:
            line = key_line(args.client, key)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if args.make:
            print(key, file=sys.stderr)
        print(line)
        return 0


COMMAND = KeyCommand()
