"""The rest of a broken stream as a request to be placed: a normal decision, whose cached prefix is known.

Model     the continuation's body is read like any other, so its chain covers prompt and sent text; who asks, and
          what it belongs to, stays as it was. It has no deadline of a first token: the client has had that
"""

from __future__ import annotations

from dataclasses import replace

from estimators.request import RequestFacts
from router.resume.continuation import Rest


def rest_as_request(first: RequestFacts, read: RequestFacts, rest: Rest, *, sent_tokens: int) -> RequestFacts:
    """Facts for the new placement.

    first : of the client's own request
    read : what the prompt reader says of the continuation's body
    sent_tokens : output tokens that the client has
    """
    return replace(
        first,
        chain=read.chain,
        prompt_tokens=read.prompt_tokens,
        prompt_exact=read.prompt_exact,
        prompt_characters=read.prompt_characters,
        block_tokens=read.block_tokens,
        chain_of_text=read.chain_of_text,
        tokenised=read.tokenised,
        max_tokens=read.max_tokens if rest is Rest.TEXT else 1,
        deadline_s=None,
        sent_tokens=sent_tokens,
    )
