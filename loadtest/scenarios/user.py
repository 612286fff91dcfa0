"""A Locust user that streams, and what every scenario shares on Locust's side: options, measuring, the report.

Model     each request becomes Locust events of three types, `T_first`, `inter-token` (the mean of one answer) and
          `end to end`, and one sample for the report. Requests of an open loop are measured from when they were due,
          so that a generator that falls behind does not hide it
Valid     any OpenAI-compatible URL with /v1/chat/completions; Locust alone, with a page, or with workers
Clock     time.perf_counter around the socket: connection set-up and the router are inside
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar
from urllib.parse import urlsplit

import gevent
import msgspec
from gevent.pool import Group
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError
from locust import User, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner, WorkerRunner

from loadtest.scenarios.goodput import Deadlines, Run, Sample, passes, report
from loadtest.scenarios.prompts import Message
from loadtest.scenarios.stream_times import StreamTimes

CONNECTIONS = 10_000  # at once, most
USUAL_KEY = "OPENAI_API_KEY"  # variable whose key is sent where it is set and none is named


class AnswerFailed(Exception):
    """A request without a whole answer, as Locust lists it; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a scenario's file states at its top."""

    name: str
    warm_up_s: float
    pass_good_share: float


@dataclass(slots=True)
class Recorder:
    """Samples of the current run of one environment, and how to reach its target."""

    scenario: Scenario
    environment: Environment
    samples: list[Sample] = field(default_factory=list)
    users: Counter[str] = field(default_factory=Counter)
    began_s: float = 0.0
    length_s: float = 0.0
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)  # of every request

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    @property
    def warm_up_s(self) -> float:
        given: float | None = self.options.warm_up_s
        return self.scenario.warm_up_s if given is None else given

    def begin(self) -> None:
        """A new run; the same seed gives the same users again."""
        self.samples.clear()
        self.users.clear()
        self.began_s = perf_counter()
        if not (self.environment.host or "").startswith(("http://", "https://")):
            raise AnswerFailed("say where to send requests: --host http://HOST:PORT")
        self.headers = {"content-type": "application/json", **key_field(self.options.api_key_env)}
        self.model = self.options.model or served_model(self.client(), self.environment.host or "", self.headers)

    def give_up(self, reason: str) -> None:
        """End a run that cannot be made; status 2."""
        print(f"{self.scenario.name}: {reason}", file=sys.stderr)
        self.model = ""
        self.environment.process_exit_code = 2
        end_of_run(self.environment)

    def client(self) -> HTTPClient:
        """Connections of its own to the target."""
        return HTTPClient.from_url(
            self.environment.host or "",
            concurrency=CONNECTIONS,
            network_timeout=self.options.timeout_s,
            connection_timeout=self.options.timeout_s,
        )

    def rng_of(self, kind: str) -> random.Random:
        """Chance for the next user of that kind."""
        self.users[kind] += 1
        runner = self.environment.runner
        worker = f"{runner.worker_index}/" if isinstance(runner, WorkerRunner) else ""
        return random.Random(f"{self.options.seed}/{worker}{kind}/{self.users[kind]}")

    def run(self) -> Run:
        """The run as it stands."""
        given: float | None = self.options.pass_good
        return Run(
            scenario=self.scenario.name,
            url=self.environment.host or "",
            seed=self.options.seed,
            warm_up_s=self.warm_up_s,
            length_s=self.length_s or perf_counter() - self.began_s,
            pass_good_share=self.scenario.pass_good_share if given is None else given,
            samples=self.samples,
        )


_RECORDERS: weakref.WeakKeyDictionary[Environment, Recorder] = weakref.WeakKeyDictionary()


def key_field(named: str) -> dict[str, str]:
    """The field that proves who asks; none without a key.

    Raises
    ------
    AnswerFailed : the variable `named` has none. "" : none is named, and the usual one may have none
    """
    key = os.environ.get(named or USUAL_KEY, "")
    if named and not key:
        raise AnswerFailed(f"--api-key-env names {named}, and that variable is not set")
    return {"authorization": f"Bearer {key}"} if key else {}


def served_model(client: HTTPClient, url: str, headers: dict[str, str]) -> str:
    """The first model the target lists to who asks with these fields.

    Raises
    ------
    AnswerFailed : it lists none; the message says how to name one.
    """
    try:
        listed = msgspec.json.decode(client.get(f"{base_path(url)}/v1/models", headers=headers).read())
        return str(listed["data"][0]["id"])
    except (OSError, HTTPParseError, msgspec.DecodeError, LookupError, TypeError) as exc:
        raise AnswerFailed(f"/v1/models names no model ({type(exc).__name__}: {exc}); give one with --model") from exc


def scenario(name: str, *, warm_up_s: float, pass_good_share: float) -> None:
    """Make the file that is given to Locust a scenario: its options, its samples, its report."""
    stated = Scenario(name, warm_up_s, pass_good_share)
    events.init_command_line_parser.add_listener(_add_options)

    def attach(environment: Environment, **_: Any) -> None:
        recorder = _RECORDERS[environment] = Recorder(stated, environment)
        _listen(recorder)
        if environment.web_ui is not None and environment.web_ui.app is not None:
            environment.web_ui.app.add_url_rule("/goodput", "goodput", lambda: _page(recorder))

    events.init.add_listener(attach)


def _page(recorder: Recorder) -> tuple[str, dict[str, str]]:
    text = report(recorder.run()) if recorder.samples else "no request was measured yet"
    return text + "\n", {"content-type": "text/plain; charset=utf-8"}


def _listen(recorder: Recorder) -> None:
    hooks = recorder.environment.events

    def begin(**_: Any) -> None:
        try:
            recorder.begin()
        except AnswerFailed as exc:
            recorder.give_up(str(exc))

    def end(environment: Environment, **_: Any) -> None:
        recorder.length_s = perf_counter() - recorder.began_s
        if environment.web_ui is not None:
            _tell(recorder)

    def leave(environment: Environment, **_: Any) -> None:
        # Without a page a run ends by leaving, and only then have all workers sent what they saw.
        if environment.web_ui is None and not isinstance(environment.runner, WorkerRunner):
            _tell(recorder)

    def to_master(data: dict[str, Any], **_: Any) -> None:
        data["samples"] = msgspec.to_builtins(recorder.samples)
        recorder.samples.clear()

    def from_worker(data: dict[str, Any], **_: Any) -> None:
        recorder.samples += msgspec.convert(data.get("samples", []), list[Sample])

    hooks.test_start.add_listener(begin)
    hooks.test_stop.add_listener(end)
    hooks.quitting.add_listener(leave)
    hooks.report_to_master.add_listener(to_master)
    hooks.worker_report.add_listener(from_worker)


def _tell(recorder: Recorder) -> None:
    """Print and keep the run, if one began."""
    if not recorder.model:
        return
    run = recorder.run()
    print(report(run), flush=True)
    if recorder.options.result is not None:
        Path(recorder.options.result).write_bytes(msgspec.json.encode(run))
    recorder.environment.process_exit_code = 0 if passes(run) else 1


def _add_options(parser: LocustArgumentParser) -> None:
    """Values are plain, since a master sends them to its workers; those without a default are not on the page."""
    parser.add_argument("--model", default="", help="default: the first that the target lists")
    parser.add_argument("--seed", type=int, default=7, help="of everything that is drawn (default %(default)s)")
    parser.add_argument("--salt", default="", help="begins every prompt: another one finds no cache warm")
    parser.add_argument("--size", type=positive, default=1.0, help="all prompts and answers so many times longer")
    parser.add_argument("--send-deadlines", action="store_true", help="as x-slo-ttft-ms and x-slo-tpot-ms")
    parser.add_argument("--exact-length", action="store_true", help="send ignore_eos, so that answers have full length")
    parser.add_argument("--tenant-header", default="x-tenant", help="field that carries the tenant's name")
    parser.add_argument(
        "--api-key-env", default="", help=f"variable with the key to send (default {USUAL_KEY}, if set)"
    )
    parser.add_argument("--timeout-s", type=positive, default=300.0, help="without a byte, most (default %(default)s)")
    for flag, kind, help_text in (
        ("--warm-up-s", not_negative, "requests before it are not counted"),
        ("--first-token-deadline-s", positive, "instead of the scenario's own"),
        ("--per-token-deadline-s", positive, "mean of an answer, instead of the scenario's own"),
        ("--end-deadline-s", positive, "instead of the scenario's own"),
        ("--pass-good", share, "least share within deadlines, instead of the scenario's own"),
        ("--result", str, "write the run into this file, to be compared with another"),
    ):
        parser.add_argument(flag, type=kind, help=help_text, include_in_web_ui=False)


def positive(text: str) -> float:
    """An option's value above 0."""
    value = not_negative(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def not_negative(text: str) -> float:
    """An option's value, finite and not below 0."""
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def share(text: str) -> float:
    """An option's value in 0..1."""
    value = not_negative(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1")
    return value


def end_of_run(environment: Environment) -> None:
    """End the run: the program too, unless a page is served or a master decides."""
    runner = environment.runner
    if runner is not None and not isinstance(runner, WorkerRunner | MasterRunner):
        gevent.spawn(runner.stop if environment.web_ui is not None else runner.quit)


class AskingUser(User):
    """Streams completions. A subclass says what, and how long it thinks in between.

    deadlines : of its requests, where the options name no others
    tenant : on whose account it asks
    """

    abstract = True
    deadlines: ClassVar[Deadlines] = Deadlines()
    tenant: ClassVar[str] = ""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._recorder = _RECORDERS[environment]
        self.kind = type(self).__name__.lower()
        self.rng = self._recorder.rng_of(self.kind)
        self.options = self._recorder.options
        self.limits = self._limits()
        self._client = self._recorder.client()
        self._path = f"{base_path(environment.host or '')}/v1/chat/completions"
        self._headers = self._headers_of()

    def on_stop(self) -> None:
        self._client.close()

    def tokens(self, usual: float) -> int:
        """A length in tokens under `--size`."""
        return max(1, round(usual * float(self.options.size)))

    def _limits(self) -> Deadlines:
        own, given = self.deadlines, self.options
        return Deadlines(
            first_token_s=given.first_token_deadline_s or own.first_token_s,
            per_token_s=given.per_token_deadline_s or own.per_token_s,
            end_s=given.end_deadline_s or own.end_s,
        )

    def _headers_of(self) -> dict[str, str]:
        headers = dict(self._recorder.headers)
        if self.tenant:
            headers[self.options.tenant_header] = self.tenant
        if self.options.send_deadlines:
            if self.limits.first_token_s is not None:
                headers["x-slo-ttft-ms"] = f"{self.limits.first_token_s * 1e3:g}"
            if self.limits.per_token_s is not None:
                headers["x-slo-tpot-ms"] = f"{self.limits.per_token_s * 1e3:g}"
        return headers

    def ask(self, messages: Sequence[Message], *, max_tokens: int, due_s: float | None = None) -> StreamTimes:
        """Send one request and read its answer to the end; what a server does wrong is in the result.

        due_s : when it should have been sent, by perf_counter; now by default
        """
        sent_s = perf_counter()
        times = StreamTimes(sent_s if due_s is None else due_s)
        body: dict[str, Any] = {
            "model": self._recorder.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.options.exact_length:
            body["ignore_eos"] = True
        size = self._stream(msgspec.json.encode(body), times)
        self._note(times, size, late_s=sent_s - times.began_s)
        return times

    def _stream(self, body: bytes, times: StreamTimes) -> int:
        """Bytes that came."""
        size = 0
        try:
            with self._client.request("POST", self._path, body=body, headers=self._headers) as response:
                if response.status_code != 200:
                    times.error = f"{response.status_code}: {response.read()[:200].decode(errors='replace')}"
                    return size
                while line := response.readline(b"\n"):
                    size += len(line)
                    times.line(line, perf_counter())
        except (OSError, HTTPParseError) as exc:
            times.error = f"{type(exc).__name__}: {exc}"
        times.ended()
        return size

    def _note(self, times: StreamTimes, size: int, *, late_s: float) -> None:
        end_s = perf_counter() - times.began_s
        recorder = self._recorder
        sample = Sample(
            name=self.kind,
            at_s=times.began_s - recorder.began_s,
            first_token_s=times.first_token_s,
            per_token_s=times.per_token_s,
            longest_gap_s=times.longest_gap_s,
            end_s=end_s,
            output_tokens=times.output_tokens,
            prompt_tokens=times.prompt_tokens,
            cached_tokens=times.cached_tokens,
            error=times.error,
            tenant=self.tenant,
            late_s=late_s,
            deadlines=self.limits,
        )
        recorder.samples.append(sample)
        name = f"{self.kind} {self.tenant}".strip()
        if sample.at_s < recorder.warm_up_s:
            name = f"{name} (warm-up)"
        for kind, taken_s in (("T_first", sample.first_token_s), ("inter-token", sample.per_token_s)):
            if taken_s is not None and sample.error is None:
                self._fire(kind, name, taken_s, 0, None)
        self._fire("end to end", name, end_s, size, sample.error)

    def _fire(self, kind: str, name: str, taken_s: float, size: int, error: str | None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=taken_s * 1e3,
            response_length=size,
            exception=None if error is None else AnswerFailed(error),
            context={},
        )


def base_path(url: str) -> str:
    """What stands before /v1 in the target's address."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1")


Job = tuple[float, Sequence[Message], int]  # seconds after the beginning when it is due, what to send, most tokens


class OpenLoop(AskingUser):
    """One clock that sends each request when it is due, whether or not earlier ones were answered."""

    abstract = True
    fixed_count = 1

    def play(self, jobs: Iterable[Job]) -> None:
        """Send all `jobs`, in order of time, wait for all, and end the run; a task that returned would begin again.

        Raises
        ------
        StopUser : always, after the last answer, or when there is nothing that could be sent.
        """
        began_s, sending = perf_counter(), Group()
        try:
            for at_s, messages, max_tokens in itertools.takewhile(
                lambda _: self._goes_on(), self._in_time(jobs, began_s)
            ):
                sending.spawn(self.ask, messages, max_tokens=max_tokens, due_s=began_s + at_s)
            sending.join()
            end_of_run(self.environment)
        except (OSError, ValueError) as exc:  # a trace that cannot be read, a rate that is none
            self._recorder.give_up(str(exc))
        finally:
            sending.kill()
        raise StopUser

    def _in_time(self, jobs: Iterable[Job], began_s: float) -> Iterator[Job]:
        for job in jobs:
            gevent.sleep(max(0.0, began_s + job[0] - perf_counter()))
            yield job

    def _goes_on(self) -> bool:
        runner = self.environment.runner
        return runner is not None and runner.state in (STATE_SPAWNING, STATE_RUNNING)
