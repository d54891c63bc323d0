"""A sequence in transformers, for comparison."""

from typing import Any

import torch


class TheirSequence:
    """Fed chunk by chunk through transformers' own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = None

    @torch.inference_mode()
    def feed(self, token_ids: list[int], logits_to_keep: int = 0) -> torch.Tensor:
        """Logits [num_tokens, vocab_size], or the last ``logits_to_keep`` rows."""
        output = self._model(
            torch.tensor([token_ids]),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        self._cache = output.past_key_values
        return output.logits[0].float()


def their_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The text that transformers' logits lead to."""
    sequence = TheirSequence(model)
    tokens = [int(sequence.feed(prompt)[-1].argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(sequence.feed(tokens[-1:])[-1].argmax()))
    return tokens


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that depend on the arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
