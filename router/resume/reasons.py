"""Why a stream cannot go on from another replica: one closed list, because it becomes a metric label."""

from __future__ import annotations

from enum import StrEnum


class WhyNot(StrEnum):
    """Known from the request alone, down to CONTINUES; from what was sent, down to TOO_OFTEN; then from the fleet."""

    BODY = "body"  # it cannot be read
    API = "api"  # not /v1/completions or /v1/chat/completions: Responses and Messages keep state of their own
    NOT_A_STREAM = "not_a_stream"
    TOOLS = "tools"  # a call's arguments are parsed out of tokens that the client does not see
    LOGPROBS = "logprobs"
    SEVERAL_CHOICES = "several_choices"  # n, best_of, beams
    STRUCTURED = "structured"  # the grammar's state is gone, and would begin anew
    ECHO = "echo"
    SUFFIX = "suffix"
    AUDIO = "audio"
    RUNNING_USAGE = "running_usage"  # usage in every event: the earlier counts cannot be continued exactly
    PROMPT_FORM = "prompt_form"  # several prompts, a list of texts, embeddings
    TRUNCATION = "truncation"  # the engine would cut a longer prompt elsewhere
    PENALTIES = "penalties"  # on output so far, which for the next replica is prompt
    TRANSFER = "transfer"  # a prompt state fetched under a one-time name
    CONTINUES = "continues"  # the client continues a message itself
    REASONING = "reasoning"  # templates take the thoughts of earlier messages out
    OVERFLOW = "overflow"  # more was sent than is kept
    UNREADABLE = "unreadable"  # an event that is no chunk of the API, or several choices
    ENGINE_ERROR = "engine_error"  # the engine itself ended the answer with an error
    IDS_UNKNOWN = "ids_unknown"  # a prompt of ids goes on from ids alone, and the engine did not tell them
    STOP_AT_CUT = "stop_at_cut"  # what was sent ends with the beginning of a stop string
    SPACE_AT_EDGE = "space_at_edge"  # templates strip the white space around a message
    TOO_OFTEN = "too_often"  # it has gone on, or was tried, as often as one request may
    NO_REPLICA = "no_replica"  # no other one could take the rest
    NO_BUDGET = "no_budget"  # for second attempts, of all requests together
    REFUSED = "refused"  # a replica, or the router's reader, would not have the rest as a request
