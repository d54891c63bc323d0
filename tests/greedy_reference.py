"""transformers' own greedy answers for the real model: what ours must equal."""

from functools import cache
from pathlib import Path

import torch

from shoal.load.greedy_check import SUBJECTS

PROMPTS = SUBJECTS[:20]


class GreedyReference:
    """transformers' SmolLM2 in fp32, one sequence at a time, with its own KV cache."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy decoding, a token at a time."""
        output = self._model(torch.tensor([prompt]), use_cache=True)
        tokens = [int(output.logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            output = self._model(
                torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
            )
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens

    @torch.inference_mode()
    def follow(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The greedy token after the prompt and after each of ``tokens`` but the last.

        Equal to ``tokens`` if and only if they are the greedy text, by induction; one forward pass
        in place of many.
        """
        logits = self._model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        return [int(token) for token in logits.argmax(-1)]


@cache
def prompt_ids(gguf: Path) -> tuple[list[int], ...]:
    """Token ids of PROMPTS by the tokenizer that the server uses."""
    from shoal.backend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(gguf)
    return tuple(tokenizer.encode(text, allow_special=True) for text in PROMPTS)
