"""Images through a whole engine: chunks, cached prefixes, preemption, many at once."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from builders import make_sampling, make_scheduler
from gemma3_pictures import make_gemma3_checkpoint, their_inputs
from gemma4_pictures import IMAGE, MAX_SOFT, interleave, make_checkpoint, make_images

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.image_prompt import num_image_tokens
from shoal.backend.messages import AddSequence, ImageForm
from shoal.scheduler.dispatched import Add
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.images import ImageSpan, PromptImage, cache_keys
from shoal.scheduler.path_digests import path_digests
from shoal.scheduler.sampled_token import SampledToken
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.worker_ledger import WorkerCapacity

NUM_TOKENS = 6
TOKEN = SampledToken(9)


class Served:
    """A checkpoint in an engine of ours, and in transformers."""

    def __init__(self, folder: Path, variant: str, **settings: Any) -> None:
        self.num_tokens = NUM_TOKENS
        self.is_gemma3 = variant == "gemma3"
        if self.is_gemma3:
            self.theirs = make_gemma3_checkpoint(folder, torch.float32)
        else:
            self.theirs = make_checkpoint(folder, torch.float32, variant)
        self.config = EngineConfig(
            str(folder),
            dtype="float32",
            kernels="reference",
            block_size=4,
            **{"num_kv_blocks": 400, "max_num_batched_tokens": 128} | settings,
        )
        self.gate, self.ready = build_engine(self.config, lambda *_: None)
        self.engine: Any = self.gate._engine
        self.store: Any = self.engine._images
        assert self.ready.images is not None
        self.form: ImageForm = self.ready.images

    def message(self, seq_id: int, images: list[np.ndarray], **fields: Any) -> AddSequence:
        counts = [num_image_tokens(self.form, *image.shape[:2]) for image in images]
        ids = interleave(counts)
        prompt_images, position = [], 0
        for image, count in zip(images, counts, strict=True):
            start = ids.index(IMAGE, position)
            position = start + count
            digest = hashlib.sha256(image.tobytes()).digest()
            span = ImageSpan(start, count, digest, self.form.both_ways)
            prompt_images.append(PromptImage(span, *image.shape[:2], image.tobytes()))
        sampling = make_sampling(temperature=0.0, max_tokens=self.num_tokens, logprobs=0)
        outputs = fields.pop("outputs", [])
        return AddSequence(
            seq_id, ids + outputs, len(ids), sampling, images=tuple(prompt_images), **fields
        )

    def run(self, *messages: AddSequence) -> dict[int, list[Any]]:
        """The tokens of each, once all have ended."""
        tokens: dict[int, list[Any]] = {message.seq_id: [] for message in messages}
        for message in messages:  # as it comes over the link
            data = msgspec.msgpack.encode(message)
            self.gate.add(msgspec.msgpack.decode(data, type=AddSequence))
        while self.gate.has_unfinished:
            for output in self.gate.step():
                assert output.error is None, output.error
                tokens[output.seq_id].append(output.token)
            self.engine._scheduler.check_integrity()
        assert self.store.num_images == 0
        return tokens

    def expected(self, message: AddSequence, images: list[np.ndarray]) -> list[tuple[int, float]]:
        """transformers' greedy tokens with their log-probabilities."""
        ids = torch.tensor([message.token_ids])
        found = []
        with torch.inference_mode():
            output = self.theirs(ids, use_cache=True, **self._their_images(ids, images))
            for _ in range(self.num_tokens):
                logprobs = output.logits[0, -1].float().log_softmax(-1)
                token = int(logprobs.argmax())
                found.append((token, float(logprobs[token])))
                output = self.theirs(torch.tensor([[token]]), cache=output.cache, use_cache=True)
        return found

    def _their_images(self, ids: torch.Tensor, images: list[np.ndarray]) -> dict[str, Any]:
        kinds = (ids == IMAGE).long()
        if self.is_gemma3:
            pixel_values = their_inputs(images)["pixel_values"]
            return {"pixel_values": pixel_values, "token_type_ids": kinds}
        processor: Any = self.store._encoder._processor
        inputs = processor(images=images, return_tensors="pt", input_data_format="channels_last")
        return {
            "pixel_values": inputs["pixel_values"],
            "image_position_ids": inputs["image_position_ids"],
            "mm_token_type_ids": kinds,
        }


def assert_same(tokens: list[Any], expected: list[tuple[int, float]]) -> None:
    assert [token.token_id for token in tokens] == [token_id for token_id, _ in expected]
    ours = [token.logprob for token in tokens]
    assert ours == pytest.approx([logprob for _, logprob in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("variant", "count", "budget"),
    [
        ("e2b", 2, 100),
        ("26b_a4b", 3, 100),
        ("26b_a4b", 3, 70),
        ("gemma3", 3, 128),
        ("gemma3", 3, 17),
    ],
)
def test_chunks_equal_transformers(tmp_path: Path, variant: str, count: int, budget: int) -> None:
    served = Served(tmp_path, variant, max_num_batched_tokens=budget, max_num_seqs=2)
    images = make_images(count)
    message = served.message(1, images)
    expected = served.expected(message, images)
    assert_same(served.run(message)[1], expected)
    assert served.store.num_encoded == count
    again = served.run(served.message(2, images))[2]  # from the cached prefix
    assert_same(again, expected)
    assert served.store.num_encoded == count
    assert served.engine.status.cache.num_hit_tokens > len(message.token_ids) - 8


@pytest.mark.parametrize("variant", ["31b", "gemma3"])
def test_a_cached_image_is_no_other_image(tmp_path: Path, variant: str) -> None:
    served = Served(tmp_path, variant)
    first = make_images(2)
    other = [first[0], 255 - first[1]]
    served.run(served.message(1, first))
    message = served.message(2, other)
    assert message.token_ids == served.message(1, first).token_ids
    hits_before = served.engine.status.cache.num_hit_tokens
    assert_same(served.run(message)[2], served.expected(message, other))
    hits = served.engine.status.cache.num_hit_tokens - hits_before
    assert 0 < hits <= message.images[1].span.start  # up to the image that differs


# All prompts of the following test fit, and what they grow by does not.
NUM_PROMPT_BLOCKS = 91


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_side_by_side(tmp_path: Path, caching: bool) -> None:
    served = Served(
        tmp_path,
        "26b_a4b",
        num_kv_blocks=NUM_PROMPT_BLOCKS,
        max_model_len=200,
        max_num_batched_tokens=80,
        max_num_seqs=4,
        prefix_caching=caching,
    )
    served.num_tokens = 20
    pictures = make_images(3)
    prompts = [pictures[:1], pictures[1:], [pictures[2], pictures[2]]]
    messages = [served.message(idx, images) for idx, images in enumerate(prompts, 1)]
    found = served.run(*messages)
    for message, images in zip(messages, prompts, strict=True):
        assert_same(found[message.seq_id], served.expected(message, images))
    assert served.engine.status.num_preemptions > 0
    assert served.store.num_encoded == 3  # each once, whoever has it


def test_replayed_with_outputs(tmp_path: Path) -> None:
    served = Served(tmp_path, "31b")
    images = make_images(1)
    expected = served.expected(served.message(1, images), images)
    outputs = [token_id for token_id, _ in expected[:3]]
    rest = served.run(served.message(1, images, outputs=outputs))[1]
    assert_same(rest, expected[3:])


def test_images_are_let_go_when_aborted_or_refused(tmp_path: Path) -> None:
    served = Served(tmp_path, "31b")
    served.gate.add(served.message(1, make_images(2)))
    assert served.store.num_images == 2
    served.gate.abort(1)
    assert served.store.num_images == 0


def test_images_that_steps_cannot_hold_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, torch.float32, "31b")
    config = EngineConfig(
        str(tmp_path),
        dtype="float32",
        kernels="reference",
        num_kv_blocks=64,
        max_num_batched_tokens=MAX_SOFT - 1,
        max_num_seqs=2,
    )
    assert build_engine(config, lambda *_: None)[1].images is None


@pytest.mark.parametrize("variant", ["31b", "gemma3"])
def test_native_kernels_run_text_alone_unless_images_are_asked_for(
    tmp_path: Path, variant: str
) -> None:
    if variant == "gemma3":
        make_gemma3_checkpoint(tmp_path, torch.float32)
    else:
        make_checkpoint(tmp_path, torch.float32, variant)
    config = EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=64)
    ready = build_engine(config, lambda *_: None)[1]
    assert (ready.kernels, ready.images) in (("native", None), ("reference", ready.images))
    ready = build_engine(dataclasses.replace(config, images=True), lambda *_: None)[1]
    assert ready.kernels == "reference"
    assert ready.images is not None
    config = dataclasses.replace(config, images=False)
    assert build_engine(config, lambda *_: None)[1].images is None


DIGEST = hashlib.sha256(b"an image").digest()


def with_image(seq_id: int, num_tokens: int, start: int, length: int) -> Sequence:
    span = ImageSpan(start, length, DIGEST, is_whole=True)
    sampling = make_sampling(max_tokens=4)
    return Sequence(seq_id, [7] * num_tokens, num_tokens, sampling, images=(span,))


def test_steps_end_before_or_after_an_image() -> None:
    """Whatever else runs; and no image waits for ever behind others."""
    for start in range(0, 40, 3):
        scheduler = make_scheduler(max_num_batched_tokens=32, max_num_seqs=8, num_blocks=200)
        sequences = [with_image(idx, 90, (start + 7 * idx) % 50, 32 - idx) for idx in range(6)]
        for sequence in sequences:
            scheduler.add(sequence)
        for _ in range(200):
            output = scheduler.schedule()
            if not output.scheduled:
                break
            assert output.num_tokens <= 32
            for item in output.scheduled:
                end = item.sequence.num_computed_tokens + item.num_tokens
                image = item.sequence.images[0]
                assert not image.start < end < image.stop
            scheduler.update_from_output(
                output, {item.sequence.seq_id: TOKEN for item in output.scheduled if item.samples}
            )
        assert not scheduler.has_unfinished


def test_cache_keys_tell_images_apart() -> None:
    ids = [5] * 20
    keys = cache_keys(ids, (ImageSpan(4, 8, DIGEST),))
    other = cache_keys(ids, (ImageSpan(4, 8, hashlib.sha256(b"another").digest()),))
    assert keys[:4] == keys[12:16] == [5] * 4
    assert all(
        ours != theirs and ours < 0 for ours, theirs in zip(keys[4:12], other[4:12], strict=True)
    )
    assert path_digests(b"", keys, 4) != path_digests(b"", other, 4)
    assert cache_keys(ids, ()) is ids


def test_images_go_with_a_replay() -> None:
    image = PromptImage(ImageSpan(1, 2, DIGEST), 1, 1, bytes(3))
    dispatcher = Dispatcher(DispatcherConfig(10))
    capacity = WorkerCapacity(100, 16, 8, 1600)
    dispatcher.worker_ready(1, capacity)
    dispatcher.add(1, [7] * 16, make_sampling(), 0.0, images=(image,))
    first = dispatcher.poll(0.0)
    dispatcher.worker_dead(1, 0.0)
    dispatcher.worker_ready(2, capacity)
    again = dispatcher.poll(0.0)
    sent = [command.sequence.images for command in first + again if isinstance(command, Add)]
    assert sent == [(image,), (image,)]
