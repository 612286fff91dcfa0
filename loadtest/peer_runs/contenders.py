"""Who is compared, by which rule of each, and in which version.

Model     each router by the rule that its own pages recommend for prompts that share beginnings; nginx, which has
          none, in turn; LiteLLM by the requests under way
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loadtest.proxy_bench.proxies import (
    IN_FOLDERS,
    LITELLM,
    NGINX,
    OURS,
    PEERS,
    PRODUCTION_STACK,
    Proxy,
    program_of,
)

WITH_FLEET, BY_URLS = "tfirst e2e", "tfirst e2e, URLs only"


def contenders(fleet: Path | None) -> list[Proxy]:
    """All, ours first: with the fleet file where there is one and the engines' own tokens, and by addresses alone."""
    knowing = {"fleet": str(fleet), "prompts": {"source": "tokenize"}}
    with_fleet = [] if fleet is None else [Proxy(WITH_FLEET, OURS, decides=True, config=knowing)]
    return [
        *with_fleet,
        Proxy(BY_URLS, OURS, decides=True),
        *(Proxy(f"{peer} cache_aware", peer, decides=True, policy="cache_aware") for peer in PEERS),
        Proxy("litellm least-busy", LITELLM, policy="least-busy"),
        Proxy("production-stack prefixaware", PRODUCTION_STACK, decides=True, policy="prefixaware"),
        Proxy("nginx", NGINX),
    ]


def version_of(proxy: Proxy, venv: Path | None) -> str:
    """As the program or its package says; "unknown" when neither does."""
    if proxy.kind == NGINX:
        said = subprocess.run(["/usr/sbin/nginx", "-v"], capture_output=True, text=True, check=False).stderr
        return said.strip().rpartition("/")[2] or "unknown"
    if proxy.kind == OURS:
        python = Path(sys.executable)
    else:
        assert venv is not None, "a peer that runs is installed"
        python = program_of(proxy.kind, venv).parent / "python"
    package = IN_FOLDERS.get(proxy.kind, proxy.kind)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False).stdout
    return said.strip() or "unknown"
