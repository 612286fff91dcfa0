"""One scenario against two or more addresses, one after another, and the figures side by side.

Question  which of these deployments, or of these settings, serves the same users better
Seed      that of the scenario, the same for all
Arrivals  the scenario's
Warm-up   the scenario's, once for each
Pass      every run ends and gives a result; each run's own mark is printed, and decides nothing here

    python -m loadtest.compare chat before=http://127.0.0.1:30000 after=http://127.0.0.1:30001 -- -u 30 -t 60

What follows `--` goes to Locust. Addresses may lead to the same replicas: each run's prompts begin with a salt of its
own, so that none finds the caches that another has filled. Two runs are one draw each: a difference that matters is
seen again with another `--seed`.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.scenarios.goodput import Run, comparison, report

HERE = Path(__file__).parent
STARTS_LOCUST = "import locust.main; locust.main.main()"


def scenario_files() -> dict[str, Path]:
    """Files that Locust can be given, by the name to ask for them."""
    found = {path.stem: path for path in sorted((HERE / "scenarios").glob("*.py")) if "\nscenario(" in path.read_text()}
    return {"mix": HERE / "locustfile.py", **found}


def named_url(text: str) -> tuple[str, str]:
    """NAME=URL."""
    name, found, url = text.partition("=")
    if not found or not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return name, url


def command_of(scenario: Path, url: str, *, salt: str, result: Path, options: Sequence[str]) -> list[str]:
    """How Locust is started; the options given come last, and so win."""
    program = [sys.executable, "-c", STARTS_LOCUST, "-f", str(scenario), "--host", url]
    return [*program, "--headless", "--only-summary", "--salt", salt, "--result", str(result), *options]


def run_one(scenario: Path, url: str, *, salt: str, folder: Path, options: Sequence[str]) -> Run | None:
    """One run; None when it gave no result, and then Locust has said why."""
    result = folder / f"{salt}.json"
    command = command_of(scenario, url, salt=salt, result=result, options=options)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.exists():
        print(f"no result from {url}:\n{ended.stderr[-2000:]}", file=sys.stderr)
        return None
    return msgspec.json.decode(result.read_bytes(), type=Run)


def main(arguments: Sequence[str] | None = None) -> int:
    files = scenario_files()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=files)
    parser.add_argument("urls", nargs="+", type=named_url, metavar="NAME=URL")
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    args, options = parser.parse_args(given[:at]), given[at + 1 :]
    if len({name for name, _ in args.urls}) < max(2, len(args.urls)):
        parser.error("give two addresses or more, each with a name of its own")
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for name, url in args.urls:
            salt = secrets.token_hex(4)
            run = run_one(files[args.scenario], url, salt=salt, folder=Path(folder), options=options)
            if run is None:
                return 1
            print(f"{name}: {report(run)}\n", flush=True)
            runs[name] = run
    print(comparison(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
