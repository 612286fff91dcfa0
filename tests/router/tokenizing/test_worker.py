from __future__ import annotations

import io
import json
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.identity import chain
from router.tokenizing import worker
from router.tokenizing.asked import Asked, Form, Unread, Wanted
from router.tokenizing.worker import Answer, Desk, Job, Load, Measure, ReadIds, Tokenise, framed, serve
from tests.router.tokenizing.small import a_directory, a_tokenizer

WANTED = Wanted(root=7, block_tokens=4)


def text(prompt: str, model: str = "m") -> Asked:
    return Asked(Form.TEXT, model, model, prompt=json.dumps(prompt).encode())


def a_desk(folder: Path, *models: str) -> Desk:
    desk = Desk()
    directory = str(a_directory(folder))
    assert desk.do(Load(directories=dict.fromkeys(models or ("",), directory))).why is None
    return desk


def test_a_text_becomes_the_blocks_of_its_tokens(tmp_path: Path) -> None:
    ids = a_tokenizer().encode("the quick brown fox jumps over").ids
    answer = a_desk(tmp_path).do(Tokenise(text("the quick brown fox jumps over"), WANTED))
    assert (answer.why, answer.tokens, answer.prompts) == (None, len(ids), 1)
    assert array("Q", answer.blocks).tolist() == chain(7, ids[:-1], 4)
    assert answer.ids is None


def test_the_tokens_themselves_come_only_when_they_are_wanted(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(WANTED, ids=True)
    answer = a_desk(tmp_path).do(Tokenise(text("the quick"), wanted))
    assert answer.ids is not None
    assert json.loads(answer.ids) == a_tokenizer().encode("the quick").ids


def test_each_model_has_its_own_tokenizer_or_none(tmp_path: Path) -> None:
    desk = a_desk(tmp_path, "m", "n")
    assert desk.do(Tokenise(text("x", "n"), WANTED)).tokens == 1
    assert desk.do(Tokenise(text("x", "other"), WANTED)).why is Unread.NO_TOKENIZER


def test_long_lists_of_ids_become_blocks_and_bad_ones_a_sentence() -> None:
    ids = list(range(100))
    answer = Desk().do(ReadIds(json.dumps(ids).encode(), WANTED))
    assert array("Q", answer.blocks).tolist() == chain(7, ids[:-1], 4)
    both = Desk().do(ReadIds(json.dumps([[1, 2], ids]).encode(), WANTED))
    assert (both.tokens, both.prompts, both.blocks) == (102, 2, answer.blocks)
    assert "token ids must be" in Desk().do(ReadIds(b"[-5,1]", WANTED)).refused
    assert "token ids must be" in Desk().do(ReadIds(b"[[1,-5],[1,2,3]]", WANTED)).refused
    assert Desk().do(ReadIds(b'["text"]', WANTED)).why is Unread.FORM


def test_characters_are_counted_without_media() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x" * 9}, {"type": "image_url", "image_url": "A"}]}
    ]
    answer = Desk().do(Measure({"messages": json.dumps(messages).encode()}, 5))
    assert (answer.characters, answer.pure) == (14, False)


@pytest.mark.parametrize("prompt", [b'"\\ud83d"', b"{", b"[[]]", b'{"a":1}', b"\xff"])
def test_odd_prompts_give_an_answer_like_any_other(tmp_path: Path, prompt: bytes) -> None:
    answer = a_desk(tmp_path).do(Tokenise(Asked(Form.TEXT, "m", "m", prompt=prompt), WANTED))
    assert answer.why is Unread.FORM


ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"


def chat(content: str) -> Asked:
    return Asked(Form.CHAT, "m", "m", messages=json.dumps([{"role": "user", "content": content}]).encode())


def test_a_template_that_does_not_end_is_ended_and_the_next_prompt_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RENDER_S", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    desk, directory = (
        Desk(),
        a_directory(tmp_path, template="{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}"),
    )
    assert desk.do(Load(directories={"": str(directory)})).why is None
    answer = desk.do(Tokenise(chat("x"), WANTED))
    assert (answer.why, answer.detail) == (Unread.TEMPLATE, "it does not come to an end")
    assert desk.do(Tokenise(text("the quick"), WANTED)).tokens > 0
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_template_that_never_ends_is_found_out_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RENDER_S", 0.05)
    desk = Desk()
    assert desk.do(Load(directories={"": str(a_directory(tmp_path, template=ENDLESS))})).why is None
    assert desk.do(Tokenise(chat("x"), WANTED)).why is Unread.TEMPLATE


@pytest.mark.parametrize("role", ["\ud83d", "x" * 100_000, "\0"])
def test_what_a_template_says_of_a_prompt_can_be_sent_whatever_is_in_it(tmp_path: Path, role: str) -> None:
    template = "{{ raise_exception('no role ' + messages[0].role) }}"
    desk = Desk()
    assert desk.do(Load(directories={"": str(a_directory(tmp_path, template=template))})).why is None
    messages = json.dumps([{"role": role, "content": "x"}]).encode()
    answer = desk.do(Tokenise(Asked(Form.CHAT, "m", "m", messages=messages), WANTED))
    assert answer.why is Unread.TEMPLATE
    assert answer.detail.startswith("no role")
    assert len(framed(answer)) < 10_000


def test_a_directory_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    answer = Desk().do(Load(directories={"": str(tmp_path)}))
    assert answer.why is Unread.NO_TOKENIZER
    assert answer.detail == f"{tmp_path} has no tokenizer.json"


def test_jobs_are_answered_in_order_until_there_are_no_more() -> None:
    jobs: list[Job] = [Load(), ReadIds(b"[1,2,3]", WANTED), Measure({"prompt": b'"abc"'}, 0)]
    given = io.BytesIO()
    serve(io.BytesIO(b"".join(map(framed, jobs)) + b"\1"), given)  # a parent that died in the middle of a frame
    answers: list[Any] = []
    given.seek(0)
    while head := given.read(4):
        answers.append(msgspec.msgpack.decode(given.read(int.from_bytes(head, "little")), type=Answer))
    assert [(answer.tokens, answer.characters) for answer in answers] == [(0, 0), (3, 0), (0, 3)]
