"""The ways a prompt's state can get to a replica. A closed set: each becomes a metric label."""

from __future__ import annotations

from enum import Enum


class Path(Enum):
    """Blocks in a replica's HBM are used on every path but RECOMPUTE; a path says what is added to them."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is Python code, run at every look-up

    LOCAL = "local"  # nothing: HBM alone
    RECOMPUTE = "recompute"  # nothing is reused
    REMOTE = "remote"  # blocks from the shared store: look-up, network, then the replica's host link
    PEER = "peer"  # another replica's copy, over the link that leaves it
    HOST = "host"  # the replica's own host memory, over its host link
    DISK = "disk"  # its own disk, then its host link


# Order of every (path, replica) array. A fleet without tiers or peers uses only the first of them.
PATHS: tuple[Path, ...] = (Path.LOCAL, Path.RECOMPUTE, Path.REMOTE, Path.PEER, Path.HOST, Path.DISK)
COLUMN: dict[Path, int] = {path: column for column, path in enumerate(PATHS)}


def main_source(*, local_tokens: int, remote_tokens: int, prompt_tokens: int) -> Path:
    """Where most of a prompt's state came from; for reports, since nearly every chat shares a few first tokens.

    All counts >= 0; local + remote <= prompt. Equal counts go to the cheaper source.
    """
    computed = prompt_tokens - local_tokens - remote_tokens
    if local_tokens >= remote_tokens and local_tokens >= computed and local_tokens > 0:
        return Path.LOCAL
    if remote_tokens >= computed and remote_tokens > 0:
        return Path.REMOTE
    return Path.RECOMPUTE
