"""What docs/policies.md says is so: its example is run, and its tables are those of the rules."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from loadtest.replay.fleets import of_file
from loadtest.replay.run import Conditions, Replay
from loadtest.traffic import read_traffic
from policies.base import Reason
from router.cli.main import main
from router.config import PolicyConfig
from router.errors import ConfigError
from router.plugins import POLICIES, build_policy, found, policy_factory
from tests.policies.desk import Desk, blocks, some_fleet
from tests.policies.test_policies import PUBLISHED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()
DEMO = ROOT / "loadtest" / "demo"


def block(language: str) -> str:
    """The one block of code in `language`."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's example as an installed package; the rule's name."""
    ((name, value),) = tomllib.loads(block("toml"))["project"]["entry-points"][POLICIES].items()
    module = value.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(block("python"))
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{POLICIES}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return str(name)


def test_the_example_is_complete_and_of_about_ten_lines() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 11
    assert max(map(len, lines)) <= 120


def test_the_example_is_found_by_name_and_does_what_the_page_says(installed: str) -> None:
    assert installed in found(POLICIES)
    desk = Desk(build_policy(installed, {"credit": 0.5}, seed=1), some_fleet(2), blocks(100, 0))
    for waiting, row in ((799, 0), (801, 1)):  # 1600 cached tokens are worth 800
        desk.view.prefill_tokens[0] = waiting
        choice = desk.ask()
        assert (choice.row, choice.reason) == (row, Reason.BEST_SCORE)
    with pytest.raises(ConfigError, match="credit must be a number"):
        build_policy(installed, {"credit": "half"}, seed=1)


def test_the_example_serves_a_trace(installed: str) -> None:
    conditions = Conditions(policy=PolicyConfig(name=installed, settings={"credit": 0.8}))
    result = Replay(of_file(DEMO / "fleet.yaml"), conditions).run(read_traffic(DEMO / "traffic.jsonl.gz")[:60])
    assert result.answered.all()


def test_the_command_lists_the_example_beside_ours(installed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    shown = capsys.readouterr().out
    listed = {line for line in shown.splitlines() if line and not line.startswith(" ")}
    assert listed >= PUBLISHED | {installed}
    assert "settings  credit=0.5" in shown


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_page_says_of_each_rule_what_the_rule_says_of_itself(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |") and line.count(" | ") == 4)
    rule = policy_factory(name)
    for said in (rule.summary, rule.reads, rule.source):
        assert said in row
