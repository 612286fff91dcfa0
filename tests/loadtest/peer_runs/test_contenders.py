import json
import sys
from pathlib import Path

import pytest

from loadtest.peer_runs.contenders import BY_URLS, WITH_FLEET, contenders, version_of
from loadtest.proxy_bench.proxies import Proxy, Setting, command_of, program_of, skipped


def a_setting(folder: Path) -> Setting:
    return Setting(folder, [7001, 7002], folder, 0, "some/model")


def one_named(word: str) -> Proxy:
    return next(proxy for proxy in contenders(None) if word in proxy.name)


def test_all_routers_that_are_asked_for_are_contenders() -> None:
    kinds = {proxy.kind for proxy in contenders(None)}
    assert kinds == {"tfirst", "sglang-router", "vllm-router", "smg", "litellm", "production-stack", "nginx"}


def test_ours_runs_with_the_fleet_file_and_with_addresses_alone(tmp_path: Path) -> None:
    with_fleet, by_urls = contenders(Path("f.yaml"))[:2]
    assert (with_fleet.name, by_urls.name) == (WITH_FLEET, BY_URLS)
    for proxy in (with_fleet, by_urls):
        command_of(proxy, a_setting(tmp_path), 7000)
    told = [json.loads((tmp_path / f"{name.replace(' ', '-')}.json").read_text()) for name in (WITH_FLEET, BY_URLS)]
    assert (told[0]["fleet"], "worker_urls" in told[0]) == ("f.yaml", False)
    assert ("fleet" in told[1], len(told[1]["worker_urls"])) == (False, 2)


@pytest.mark.parametrize("word", ["smg", "litellm", "production-stack"])
def test_a_peer_that_is_not_installed_is_skipped_with_a_reason(word: str, tmp_path: Path) -> None:
    assert "could not be installed" in (skipped(one_named(word), a_setting(tmp_path)) or "")
    program = program_of(one_named(word).kind, tmp_path)
    program.parent.mkdir(parents=True)
    program.touch()
    assert skipped(one_named(word), a_setting(tmp_path)) is None


def test_litellm_is_given_all_replicas_of_the_model(tmp_path: Path) -> None:
    command = command_of(one_named("litellm"), a_setting(tmp_path), 7000)
    config = json.loads(Path(command[command.index("--config") + 1]).read_text())
    assert [one["model_name"] for one in config["model_list"]] == ["some/model"] * 2
    assert [one["litellm_params"]["api_base"] for one in config["model_list"]] == [
        "http://127.0.0.1:7001/v1",
        "http://127.0.0.1:7002/v1",
    ]


def test_the_production_stack_is_given_all_replicas_of_the_model(tmp_path: Path) -> None:
    command = command_of(one_named("production-stack"), a_setting(tmp_path), 7000)
    assert {"http://127.0.0.1:7001,http://127.0.0.1:7002", "some/model,some/model", "prefixaware"} <= set(command)


def test_our_version_is_that_of_the_package() -> None:
    assert version_of(one_named("tfirst"), Path(sys.prefix))[0].isdigit()
