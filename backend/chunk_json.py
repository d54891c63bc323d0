"""The parts of a chunk that travel as JSON."""

import json
from dataclasses import asdict
from typing import Any

from shoal.backend.chunk import Alternative, TokenLogprobs, ToolCallDelta


def tool_calls_json(calls: tuple[ToolCallDelta, ...]) -> str:
    """Deltas in order: a call's id and name come first, then pieces of its arguments."""
    return json.dumps([asdict(call) for call in calls])


def logprobs_json(entries: tuple[TokenLogprobs, ...]) -> str:
    """One object a token of the text, from token id to its entry, the sampled token first."""
    return json.dumps([_logprobs_of_token(entry) for entry in entries])


def _logprobs_of_token(entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    found = {str(entry.sampled.token_id): _alternative(entry.sampled)}
    for item in entry.top:
        found.setdefault(str(item.token_id), _alternative(item))
    return found


def _alternative(item: Alternative) -> dict[str, Any]:
    return {
        "logprob": item.logprob,
        "rank": item.rank,
        "decoded_token": item.text,
        "bytes": list(item.token_bytes),
    }
