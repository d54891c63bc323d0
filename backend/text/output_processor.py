"""From sampled tokens of one sequence to the text deltas its client gets."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.backend.chunk import TokenLogprobs, ToolCallDelta
from shoal.backend.text.detokenizer import IncrementalDetokenizer
from shoal.backend.text.reasoning import ReasoningParser
from shoal.backend.text.stop import StopChecker
from shoal.backend.text.token_logprobs import LogprobAligner
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_calls import CallArguments, CallStart, Content, Event
from shoal.backend.text.tool_parser import ToolParser
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason


@dataclass(slots=True)  # frozen, one would take three times as long to make
class TextDelta:
    """What one push added. ``text`` may be empty: half a character, or a stop string's beginning.

    ``stop_hit``: a stop string ended the text here, so ``finish_reason`` is STOP. The worker does
    not know of it; the caller aborts the sequence there.
    """

    text: str = ""
    num_new_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_hit: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()  # where the request wants them
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""  # what the model thinks, before its answer


class OutputProcessor:
    """Detokenises one sequence's output and looks for its stop strings and calls of tools.

    Owned by one thread. After a finish every further push gives an empty delta, so tokens still in
    flight after a stop string are harmless.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
    ) -> None:
        visible = tool_parser.marker_ids(tokenizer) if tool_parser else frozenset()
        if reasoning_parser is not None:
            visible |= reasoning_parser.marker_ids(tokenizer)
        self._reasoning_parser = reasoning_parser
        self._detokenizer = IncrementalDetokenizer(tokenizer, visible)
        self._tool_parser = tool_parser
        self._num_calls = 0
        self._stop_checker = StopChecker(sampling.stop)
        self._aligner = None if sampling.logprobs is None else LogprobAligner(tokenizer)
        self._is_plain = not (sampling.stop or tool_parser or reasoning_parser or self._aligner)
        self._min_tokens = sampling.min_tokens
        self.num_output_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all there is to a token, unless it is the last, is its text: ``push_plain``."""
        return self._is_plain and self.finish_reason is None

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """Take tokens after which the output goes on, while ``is_plain``. Mutates."""
        self.num_output_tokens += len(token_ids)
        return self._detokenizer.push_all(token_ids)

    def push(
        self, token: SampledToken | None, finish_reason: FinishReason | None = None
    ) -> TextDelta:
        """Take one token, a finish, or both (as StepOutput carries them). Mutates."""
        if self.finish_reason is not None:
            return TextDelta()
        text = "" if token is None else self._take_token(token, finish_reason)
        if finish_reason is not None:
            text += self._end_text()
        stop_hit = False
        if self.num_output_tokens > self._min_tokens:  # before that, a stop string does not count
            text, stop_hit = self._stop_checker.push(text)
        if stop_hit:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self._stop_checker.flush()
        self.finish_reason = finish_reason
        logprobs: tuple[TokenLogprobs, ...] = ()
        if self._aligner is not None:
            logprobs = self._aligner.release(len(text), finish_reason is not None, stop_hit)
        num_tokens = int(token is not None)
        thoughts = ""
        if self._reasoning_parser is not None:
            thoughts, text = self._part_thoughts(self._reasoning_parser, text)
        if self._tool_parser is None:
            return TextDelta(
                text, num_tokens, finish_reason, stop_hit, logprobs, reasoning=thoughts
            )
        said, calls = self._part(self._tool_parser, text)
        has_called = self._num_calls > 0 and not self._tool_parser.is_cut
        if has_called and finish_reason is FinishReason.STOP:
            self.finish_reason = finish_reason = FinishReason.TOOL_CALLS
        return TextDelta(said, num_tokens, finish_reason, stop_hit, logprobs, calls, thoughts)

    def _part_thoughts(self, parser: ReasoningParser, text: str) -> tuple[str, str]:
        thoughts, answer = parser.push(text)
        if self.finish_reason is not None:
            more_thoughts, more_answer = parser.flush()
            thoughts, answer = thoughts + more_thoughts, answer + more_answer
        return thoughts, answer

    def _part(self, parser: ToolParser, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What the text says, and what it calls."""
        events: list[Event] = parser.push(text)
        if self.finish_reason is not None:
            events += parser.flush()
        said, calls = "", []
        for event in events:
            match event:
                case Content(text=more):
                    said += more
                case CallStart(name=name):
                    call_id = f"call_{secrets.token_hex(12)}"
                    calls.append(ToolCallDelta(self._num_calls, id=call_id, name=name))
                    self._num_calls += 1
                case CallArguments(text=more):
                    calls.append(ToolCallDelta(self._num_calls - 1, more))
        return said, tuple(calls)

    def _take_token(self, token: SampledToken, finish_reason: FinishReason | None) -> str:
        self.num_output_tokens += 1
        if token.logprob is not None:
            self.cumulative_logprob += token.logprob
        # A worker finishes with STOP only on an EOS or stop id: that token ends the text, unseen.
        if finish_reason is FinishReason.STOP:
            return ""
        text = self._detokenizer.push(token.token_id)
        if self._aligner is not None:
            self._aligner.push(token, text, self._detokenizer.in_character)
        return text

    def _end_text(self) -> str:
        text = self._detokenizer.finish()
        if self._aligner is not None:
            self._aligner.append(text)
        return text
