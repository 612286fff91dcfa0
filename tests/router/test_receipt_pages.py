"""What the pages on receipts and experiments say is so."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from router.assemble import experiments_of
from router.config import ReceiptConfig, parse_config
from router.receipts import SCHEMA, Candidate, Receipt

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_every_field_of_a_receipt_is_on_the_page() -> None:
    text = page("receipts.md")
    request, candidate = text.split("| field of a candidate | says |")
    rows = re.findall(r"^\| (`.*?) \|", request.split("| field | says |")[1], flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(Receipt.__struct_fields__) - {"schema"} <= named
    rows = re.findall(r"^\| (`.*?) \|", candidate, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(Candidate.__struct_fields__) - {"replica", "path"}
    assert f"The schema is {SCHEMA}" in text


def test_the_receipts_section_shown_is_the_default_but_for_its_path() -> None:
    shown = page("receipts.md").partition("```yaml\n")[2].partition("```")[0]
    config = parse_config(shown).receipts
    assert msgspec.structs.replace(config, path=None) == ReceiptConfig()


def test_the_experiment_shown_can_be_run() -> None:
    shown = page("experiments.md").partition("```yaml\n")[2].partition("```")[0]
    config = parse_config(shown)
    experiments = experiments_of(config)
    assert experiments.arms == ("steady", "bold")
    assert config.experiment is not None
    assert config.experiment.trusted == ["alice"]
