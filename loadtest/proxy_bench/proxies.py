"""How each proxy under test is started: this router, nginx, the Rust routers from their packages, and LiteLLM.

Model     every proxy gets the same replicas, its own port, quiet logs and, where it has them, metrics on; nginx and the
          routers run one worker, on one core
Valid     packages in an environment of their own (`--peers-venv`), never in the project's. LiteLLM has one below that
          one, `litellm/`, since it pins what the others use, and so has vLLM's production-stack router,
          `production-stack/`, which is in no package index and is installed there by hand
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.proxy_bench.process import family_of, running, wait_until_served

OURS, NGINX = "tfirst", "nginx"
LITELLM, PRODUCTION_STACK = "litellm", "production-stack"
PEERS = ("sglang-router", "vllm-router", "smg")
IN_FOLDERS = {LITELLM: "litellm", PRODUCTION_STACK: "vllm-router"}  # their programs, each in an environment of its own
NEEDED_BESIDE = (
    "setproctitle",
    "aiohttp",
    "orjson",
    "uvicorn",
    "fastapi",
    "requests",
    "grpcio",
    "grpcio-health-checking",
    "pyyaml",
)
# LiteLLM would fetch prices of models from elsewhere, write a line for each request, and break off an answer that says
# the same word a hundred times, as simulated engines do.
EXTRA: dict[str, dict[str, str]] = {
    OURS: {"PYTHONUNBUFFERED": "1"},
    LITELLM: {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "NO_PROXY": "*",
        "REPEATED_STREAMING_CHUNK_LIMIT": "1000000",
    },
}


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that can be started.

    decides : it looks at the prompt; else it takes replicas in turn
    config : of this router, laid over the bench's own
    events : this router is told where the replicas' cache events come from
    """

    name: str
    kind: str
    decides: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""
    events: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """One that runs: where it listens, and its processes."""

    proxy: Proxy
    port: int
    family: list[int]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where everything is.

    folder : for logs and configurations; core : of the proxies
    model : what replicas serve; publishers : where each replica's cache events come from
    """

    folder: Path
    replicas: Sequence[int]
    peers_venv: Path | None
    core: int
    model: str = "m"
    publishers: Sequence[int] = ()


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def install_peers(venv: Path) -> list[str]:
    """Install what can be had of the peers into `venv`, with what they import; those that are there now."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
    there = [name for name in PEERS if (venv / "bin" / name).exists()]
    for name in PEERS:
        if name not in there and subprocess.run([*pip, "--no-deps", name], check=False).returncode == 0:
            there.append(name)
    if there:
        subprocess.run([*pip, *NEEDED_BESIDE], check=False)
    return there


def install_litellm(venv: Path) -> bool:
    """Install LiteLLM's proxy into `venv`/litellm; whether it is there now."""
    python = venv / LITELLM / "bin" / "python"
    if not program_of(LITELLM, venv).exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv / LITELLM)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "litellm[proxy]"], check=False)
    return program_of(LITELLM, venv).exists()


def program_of(kind: str, venv: Path) -> Path:
    """Where a peer's program is, if it is there."""
    return venv / kind / "bin" / IN_FOLDERS[kind] if kind in IN_FOLDERS else venv / "bin" / kind


def skipped(proxy: Proxy, setting: Setting) -> str | None:
    """Why a proxy cannot be run here; None when it can."""
    if proxy.kind == NGINX:
        return None if shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin") else "nginx is not installed"
    if proxy.kind in (*PEERS, *IN_FOLDERS):
        if setting.peers_venv is None:
            return "no --peers-venv given"
        if not program_of(proxy.kind, setting.peers_venv).exists():
            return f"{proxy.kind} could not be installed"
    return None


@contextlib.contextmanager
def started(proxy: Proxy, setting: Setting) -> Iterator[Running]:
    """The proxy, pinned and serving."""
    port = free_port()
    log = setting.folder / f"{proxy.name.replace(' ', '-')}.log"
    extra = EXTRA.get(proxy.kind, {})
    with running(command_of(proxy, setting, port), core=setting.core, log=log, extra=extra) as process:
        wait_until_served(process, port, log, proxy.name, setting.model)
        yield Running(proxy, port, family_of(process.pid))


def command_of(proxy: Proxy, setting: Setting, port: int) -> list[str]:
    """How it is started."""
    urls = [f"http://127.0.0.1:{replica}" for replica in setting.replicas]
    if proxy.kind == OURS:
        return _ours(proxy, setting, port, urls)
    if proxy.kind == NGINX:
        return _nginx(setting, port)
    assert setting.peers_venv is not None, "a peer that is not skipped is installed"
    program = [str(program_of(proxy.kind, setting.peers_venv))]
    if proxy.kind == LITELLM:
        return [*program, *_litellm(proxy, setting, port, urls)]
    if proxy.kind == PRODUCTION_STACK:
        return [*program, *_production_stack(proxy, setting, port, urls)]
    if proxy.kind != "vllm-router":
        program.append("launch")
    return [
        *program,
        *("--worker-urls", *urls),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", proxy.policy),
        *("--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"),
        *("--log-level", "error"),
    ]


def _litellm(proxy: Proxy, setting: Setting, port: int, urls: Sequence[str]) -> list[str]:
    config = {
        "model_list": [
            {
                "model_name": setting.model,
                "litellm_params": {
                    "model": f"hosted_vllm/{setting.model}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in urls
        ],
        "router_settings": {"routing_strategy": proxy.policy, "num_retries": 0},
        "litellm_settings": {"telemetry": False},
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},  # it listens on loopback alone
    }
    path = setting.folder / f"{proxy.name.replace(' ', '-')}.json"
    path.write_text(json.dumps(config))
    return ["--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


def _production_stack(proxy: Proxy, setting: Setting, port: int, urls: Sequence[str]) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--service-discovery", "static"),
        *("--static-backends", ",".join(urls), "--static-models", ",".join([setting.model] * len(urls))),
        *("--routing-logic", proxy.policy),
    ]


def _ours(proxy: Proxy, setting: Setting, port: int, urls: Sequence[str]) -> list[str]:
    where = {} if "fleet" in proxy.config else {"worker_urls": list(urls)}
    config: dict[str, Any] = {
        **where,
        "host": "127.0.0.1",
        "port": port,
        "admin_host": "127.0.0.1",
        "admin_port": free_port(),
        **proxy.config,
    }
    if proxy.events:
        told = zip(urls, setting.publishers, strict=True)
        replicas = [
            {"name": f"r{row}", "url": url, "events": f"tcp://127.0.0.1:{events}"}
            for row, (url, events) in enumerate(told)
        ]
        fleet = setting.folder / "fleet-with-events.json"
        fleet.write_text(json.dumps({"replicas": replicas}))
        del config["worker_urls"]
        config["fleet"] = str(fleet)
    path = setting.folder / f"{proxy.name.replace(' ', '-')}.json"
    path.write_text(json.dumps(config))  # JSON is YAML
    return [sys.executable, "-m", "router.cli.main", "serve", "--config", str(path), "--log-level", "error"]


def _nginx(setting: Setting, port: int) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{replica};" for replica in setting.replicas)
    path = setting.folder / "nginx.conf"
    user = "user root; " if os.geteuid() == 0 else ""  # its workers write to the folder, too
    path.write_text(
        f"""{user}daemon off; worker_processes 1; pid {setting.folder}/nginx.pid; error_log stderr crit;
worker_rlimit_nofile 20000; events {{ worker_connections 16000; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 100000000;
  client_body_temp_path {setting.folder}/nginx-body; proxy_temp_path {setting.folder}/nginx-proxy;
  upstream replicas {{ {servers} keepalive 256; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://replicas; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; proxy_set_header X-Forwarded-For $remote_addr; }} }} }}
"""
    )
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    assert nginx is not None, "nginx is skipped where it is not installed"
    return [nginx, "-c", str(path), "-p", str(setting.folder)]
