from __future__ import annotations

from sim_backends import tokenizer

VOCAB = 151936


def test_a_longer_text_keeps_the_tokens_of_its_full_groups() -> None:
    text = "Wie geht es dir? 北京 🙂 " * 20
    whole = tokenizer.encode(text, vocab=VOCAB)
    for cut in range(0, len(text.encode()), 13):
        part = text.encode()[:cut].decode(errors="ignore")
        full = len(part.encode()) // 4
        assert tokenizer.encode(part, vocab=VOCAB)[:full] == whole[:full]


def test_ids_are_in_the_vocabulary_and_mostly_distinct() -> None:
    ids = tokenizer.encode("".join(f"{number:04d}" for number in range(5000)), vocab=VOCAB)
    assert len(ids) == 5000
    assert min(ids) >= 1000
    assert max(ids) < VOCAB
    assert len(set(ids)) > 4850  # 5000 drawn from 150,936 would share about 82 ids


def test_an_empty_text_has_no_tokens() -> None:
    assert tokenizer.encode("", vocab=VOCAB) == []


def test_a_conversation_is_the_prefix_of_its_continuation() -> None:
    first = [("user", "hello")]
    longer = [*first, ("assistant", "hi"), ("user", "and?")]
    begin = tokenizer.render_chat(first, add_generation_prompt=True)
    assert tokenizer.render_chat(longer).startswith(begin)


def test_a_turn_that_goes_on_is_the_prompt_and_what_was_said() -> None:
    turns = [("system", "be brief"), ("user", "hello")]
    rendered = tokenizer.render_chat([*turns, ("assistant", "hi th")], add_generation_prompt=False, goes_on=True)
    assert rendered == tokenizer.render_chat(turns) + "hi th"
    assert tokenizer.render_chat([], goes_on=True, add_generation_prompt=False) == ""


def test_the_bound_never_exceeds_the_count() -> None:
    for text in ("", "a", "abcd", "abcde", "北京" * 9):
        assert tokenizer.count_bound(text) <= len(tokenizer.encode(text, vocab=VOCAB))
