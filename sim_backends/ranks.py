"""Several data-parallel ranks behind one URL: who gets a request, and what they say together.

Model     the header X-data-parallel-rank names the rank; without it ranks take turns. Each rank is an engine of its
          own; one page of metrics has the samples of all, told apart by the label `engine`
Source    vLLM (header from 0.11.2); its event publishers listen on the base port plus the rank
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

RANK_HEADER = "X-data-parallel-rank"


class BadRank(ValueError):
    """The header names no rank; the client is told with status 400."""

    def __init__(self, text: str, ranks: int) -> None:
        super().__init__(f"{RANK_HEADER} is {text!r}; this server has ranks 0..{ranks - 1}.")


class RankPicker:
    """Ranks 0..`ranks`-1 of one server, `ranks` >= 1."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._next = 0

    def pick(self, header: str | None) -> int:
        """The rank a request goes to. Raises BadRank."""
        if header is None:
            rank, self._next = self._next, (self._next + 1) % self.ranks
            return rank
        text = header.strip()
        if not text.isascii() or not text.isdigit() or int(text) >= self.ranks:
            raise BadRank(header, self.ranks)
        return int(text)


def shifted(address: str, rank: int) -> str:
    """The address of a rank's publisher: `rank` ports above the base; a port the system gives stays that.

    >>> shifted("tcp://127.0.0.1:5557", 2)
    'tcp://127.0.0.1:5559'
    """
    if address.endswith(":*"):
        return address
    port = urlsplit(address).port
    assert port is not None, "checked when the fleet was read"
    return f"{address.rsplit(':', 1)[0]}:{port + rank}"


def merged(pages: Sequence[str]) -> str:
    """One Prometheus page of several of the same form: each family once, with the samples of all pages.

    Lines that are equal in all pages (of the process, not of a rank) are kept once.
    """
    families: dict[str, dict[str, None]] = {}  # lines by family, in order
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            families.setdefault(family, {})[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
