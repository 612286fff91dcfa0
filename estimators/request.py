"""One request as estimators and policies see it: facts only, no bytes, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)  # not frozen: checked assignments cost as much as all else that is made of a short prompt
class RequestFacts:
    """What is known of a request before it is placed; not to be changed.

    request_id : unique among requests in flight
    model : name the client asked for
    chain : block hashes of the prompt's reusable blocks, seeded by its identity; empty when the tokens
        are not known. An engine always computes at least one token, so the chain covers at most
        `prompt_tokens - 1` tokens.
    base_model : model whose weights and replicas stand behind that name; "" when it is the name itself
    prompt_tokens : tokens of the prompt, >= 0; an estimate when `prompt_exact` is false
    prompt_exact : whether `prompt_tokens` was counted rather than guessed from bytes
    prompt_characters : characters of text the prompt's length was guessed from; 0 when it was counted
    max_tokens : the client's own limit on output tokens; None when it set none
    streams : whether the client asked for a stream, so that a first token can be observed
    generates : whether the request runs a prefill at all (false for /tokenize and the like)
    explain : whether the client asked for the receipt's summary
    path : request path: for the receipt, and one of the groups output lengths are learned by
    session : what names the conversation, if anything does; output lengths are learned by it too
    block_tokens : tokens in each block of `chain`, >= 1
    chain_of_text : whether the blocks are of text rather than tokens: no engine announces such blocks, so only what
        the router remembers of its own placements can match them
    tokenised : form of a prompt whose tokens the router counted itself; "" when the client gave them, or nobody did
    priority : of those that wait, larger is sooner
    tenant : whose request it is, of those who share the fleet; "" when nobody says
    deadline_s : of its first token, from its arrival, > 0; None: the client named none
    edited : fields of the body that the router changed or added
    client : name of the key that let the client in; "" when none is needed
    own_id : id the body gives the request, which its engine then uses; "" when it gives none
    continues : id of the stored response it goes on from; "" for none
    trace : of who follows it, the shell's own; opaque
    sent_tokens : output tokens of it that the client has, because this is the rest of a stream whose replica died;
        None: it is a whole request
    pace_deadline_s : of each further output token, on average, > 0; None: the client named none
    only : name of the one replica that can run it, because state it needs is there; "" when any can
    policy : rule or arm its client asks to decide about it; "" when it does not
    unit : what an experiment assigns it by, where that is a header; "" without it
    """

    request_id: str
    model: str
    prompt_tokens: int = 0
    chain: list[int] = field(default_factory=list)
    prompt_exact: bool = True
    prompt_characters: int = 0
    max_tokens: int | None = None
    streams: bool = False
    generates: bool = True
    explain: bool = False
    base_model: str = ""
    session: str | None = None
    path: str = "/v1/completions"
    block_tokens: int = 16
    chain_of_text: bool = False
    tokenised: str = ""
    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    edited: tuple[str, ...] = ()
    client: str = ""
    own_id: str = ""
    continues: str = ""
    only: str = ""
    policy: str = ""
    unit: str = ""
    pace_deadline_s: float | None = None
    sent_tokens: int | None = None
    trace: object = field(default=None, compare=False)
