"""`tfirst policies`: each rule, what it reads, where it comes from."""

from __future__ import annotations

import argparse
import inspect

from router.plugins import POLICIES, found, policy_factory


class PoliciesCommand:
    name = "policies"
    help = "list the routing rules: what each reads, its settings and its source"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """No options."""

    def run(self, args: argparse.Namespace) -> int:
        for name in found(POLICIES):
            factory = policy_factory(name)
            settings = [
                f"{key}={parameter.default}"
                for key, parameter in inspect.signature(factory).parameters.items()
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            ]
            print(f"{name}\n    takes     {factory.summary}\n    reads     {factory.reads}")
            print(f"    settings  {', '.join(settings) or 'none'}\n    source    {factory.source}\n")
        print("Choose one with --policy NAME, or in the configuration: policy: {name: NAME, settings: {...}}")
        return 0


COMMAND = PoliciesCommand()
