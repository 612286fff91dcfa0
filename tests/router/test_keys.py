from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.keys import ClientKeys, SecretKey, bearer, key_line, load_keys, new_key, parse_keys


def test_a_new_key_lets_its_holder_in_by_the_line_made_for_it() -> None:
    keys = {name: new_key() for name in ("alice", "bob-2")}
    read = parse_keys("\n".join(key_line(name, key) for name, key in keys.items()), "here")
    assert [read.name_of(key.encode()) for key in keys.values()] == ["alice", "bob-2"]
    assert read.names == {"alice", "bob-2"}


def test_two_new_keys_differ_and_neither_can_be_read_off_its_line() -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert len(first) >= 43
    assert first not in key_line("a", first)


@given(st.binary(max_size=80))
def test_nothing_but_a_key_lets_in(given: bytes) -> None:
    assert parse_keys(key_line("a", new_key()), "here").name_of(given) is None


def test_comments_and_empty_lines_are_passed_over_and_a_name_may_have_two_keys() -> None:
    old, new = new_key(), new_key()
    text = f"# of the team\n\n{key_line('a', old)}  # until May\n\t{key_line('a', new)}\n"
    keys = parse_keys(text, "here")
    assert (len(keys), keys.name_of(old.encode()), keys.name_of(new.encode())) == (2, "a", "a")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("alice", "line 2: not of the form"),
        ("alice my-secret-key-in-the-clear", "line 2: not of the form"),
        ("alice sha256:12", "line 2: not of the form"),
        (f"a b sha256:{'0' * 64}", "line 2: not of the form"),
        (f"{'a' * 65} sha256:{'0' * 64}", "line 2: not of the form"),
        (f"b sha256:{'0' * 64}", "line 2: the key of a is there already"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_never_repeated(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_keys(f"a sha256:{'0' * 64}\n{line}\n", "keys")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nobody yet\n"])
def test_a_file_without_keys_is_a_mistake_not_an_open_door(text: str) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        parse_keys(text, "keys")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_keys(tmp_path / "binary")


@pytest.mark.parametrize("key", ["short", "a" * 31, "a" * 40 + " ", "\u00e4" * 40, "a" * 40 + "\n"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="at least 32"):
        key_line("a", key)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "a\n", "a:b"])
def test_a_name_that_is_no_label_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a key"):
        key_line(name, new_key())


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"Bearer abc", b"abc"),
        (b"BEARER  abc ", b"abc"),
        (b"Bearer", b""),
        (b"Bearerabc", b""),
        (b"Basic abc", b""),
        (b"", b""),
        (None, b""),
    ],
)
def test_a_bearer_token_is_found_whatever_the_case_of_its_scheme(value: bytes | None, key: bytes) -> None:
    assert bearer(value) == key


def test_a_secret_key_matches_itself_alone_and_does_not_show_itself() -> None:
    key = SecretKey("s3cret")
    assert key.matches(b"s3cret")
    assert not any(key.matches(given) for given in (b"", b"s3cre", b"s3cret ", b"\xff" * 100))
    assert "s3cret" not in repr(key)


def test_keys_show_names_alone() -> None:
    key = new_key()
    assert key not in repr(parse_keys(key_line("a", key), "x"))
    assert ClientKeys({}).names == frozenset()
