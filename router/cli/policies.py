"""`tfirst policies`: each rule, what it reads, where it comes from."""

from __future__ import annotations

import argparse

from router.plugins import POLICIES, found, policy_factory, settings_of


class PoliciesCommand:
    name = "policies"
    help = "list the routing rules: what each reads, its settings and its source"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """No options."""

    def run(self, args: argparse.Namespace) -> int:
        for name in found(POLICIES):
            factory = policy_factory(name)
            settings = [f"{key}={usual}" for key, usual in settings_of(factory).defaults.items()]
            print(f"{name}\n    takes     {factory.summary}\n    reads     {factory.reads}")
            print(f"    settings  {', '.join(settings) or 'none'}\n    source    {factory.source}\n")
        print("Choose one with --policy NAME, or in the configuration: policy: {name: NAME, settings: {...}}")
        return 0


COMMAND = PoliciesCommand()
