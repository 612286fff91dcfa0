from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.state import SCHEMA, load_state, save_state

LEARNED = {"replicas": {"a": {"prefill": {"coefficients": [1.5, 0.1], "samples": 12}}}, "hits": None}


def test_what_was_saved_is_loaded_with_its_age(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, LEARNED, saved_at=1000.0)
    state = load_state(path)
    assert state is not None
    assert state.learned == LEARNED
    assert state.age_s(1600.0) == 600.0


def test_a_state_from_the_future_is_new(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, LEARNED, saved_at=1000.0)
    state = load_state(path)
    assert state is not None
    assert state.age_s(500.0) == 0.0


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert load_state(tmp_path / "state.json") is None


def test_a_later_state_replaces_the_earlier_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, {"of": "yesterday" * 1000}, saved_at=1.0)
    save_state(path, LEARNED, saved_at=2.0)
    state = load_state(path)
    assert state is not None
    assert state.learned == LEARNED
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_state_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    save_state(path, LEARNED, saved_at=1.0)
    with pytest.raises(TypeError):
        save_state(path, {"no plain value": object()}, saved_at=2.0)

    def full_disk(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_state(path, {}, saved_at=3.0)
    state = load_state(path)
    assert state is not None
    assert (state.saved_at, state.learned) == (1.0, LEARNED)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_state(tmp_path / "nowhere" / "state.json", LEARNED, saved_at=1.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"saved_at": 1}', '{"saved_at": "x", "learned": {}}'])
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"state\.json holds no state"):
        load_state(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "saved_at": 1.0, "learned": {}}))
    with pytest.raises(ValueError, match=f"schema {SCHEMA + 1}"):
        load_state(path)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read_and_never_anything_else(tmp_path: Path, cut: int, byte: int) -> None:
    path = tmp_path / "state.json"
    save_state(path, LEARNED, saved_at=1000.0)
    whole = path.read_bytes()
    at = cut % len(whole)
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :] if byte % 2 else whole[:at])
    with suppress(ValueError):
        state = load_state(path)
        assert state is not None
        assert isinstance(state.learned, dict)
