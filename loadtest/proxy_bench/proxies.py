"""How each proxy under test is started: this router, nginx, and the Rust routers from their packages.

Model     every proxy gets the same replicas, its own port, quiet logs and, where it has them, metrics on; nginx and the
          routers run one worker, on one core
Valid     packages in an environment of their own (`--peers-venv`), never in the project's
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
PEERS = ("sglang-router", "vllm-router", "smg")
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
    publishers : where each replica's cache events come from
    """

    folder: Path
    replicas: Sequence[int]
    peers_venv: Path | None
    core: int
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


def skipped(proxy: Proxy, setting: Setting) -> str | None:
    """Why a proxy cannot be run here; None when it can."""
    if proxy.kind == NGINX:
        return None if shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin") else "nginx is not installed"
    if proxy.kind in PEERS:
        if setting.peers_venv is None:
            return "no --peers-venv given"
        if not (setting.peers_venv / "bin" / proxy.kind).exists():
            return f"{proxy.kind} could not be installed"
    return None


@contextlib.contextmanager
def started(proxy: Proxy, setting: Setting) -> Iterator[Running]:
    """The proxy, pinned and serving."""
    port = free_port()
    log = setting.folder / f"{proxy.name.replace(' ', '-')}.log"
    extra = {} if proxy.kind != OURS else {"PYTHONUNBUFFERED": "1"}
    with running(command_of(proxy, setting, port), core=setting.core, log=log, extra=extra) as process:
        wait_until_served(process, port, log, proxy.name)
        yield Running(proxy, port, family_of(process.pid))


def command_of(proxy: Proxy, setting: Setting, port: int) -> list[str]:
    """How it is started."""
    urls = [f"http://127.0.0.1:{replica}" for replica in setting.replicas]
    if proxy.kind == OURS:
        return _ours(proxy, setting, port, urls)
    if proxy.kind == NGINX:
        return _nginx(setting, port)
    assert setting.peers_venv is not None, "a peer that is not skipped is installed"
    program = [str(setting.peers_venv / "bin" / proxy.kind)]
    if proxy.kind != "vllm-router":
        program.append("launch")
    return [
        *program,
        *("--worker-urls", *urls),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", proxy.policy),
        *("--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"),
        *("--log-level", "error"),
    ]


def _ours(proxy: Proxy, setting: Setting, port: int, urls: Sequence[str]) -> list[str]:
    config: dict[str, Any] = {
        "worker_urls": list(urls),
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
