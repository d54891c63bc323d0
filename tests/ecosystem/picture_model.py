"""A tiny model that takes images, for clients that send them. Its answers mean nothing."""

import json
from pathlib import Path

import torch
import yaml
from gemma3_pictures import make_gemma3_checkpoint
from gemma4_pictures import BEGIN, END, IMAGE
from text_builders import make_tokenizer

NAME = "picture"
_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<begin>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}<end>{% endfor %}[assistant] "
)


def add_picture_model(repository: Path, weights: Path) -> None:
    """Write the checkpoint to ``weights`` and a model of it to the repository."""
    make_gemma3_checkpoint(weights, torch.float32)
    named = {IMAGE: "<image>", BEGIN: "<begin>", END: "<finish>"}
    fillers = tuple(named.get(idx, f"<unused{idx}>") for idx in range(259, max(named) + 1))
    tokenizer = make_tokenizer(special=fillers)
    (weights / "tokenizer.json").write_text(tokenizer.to_json())
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (weights / "tokenizer_config.json").write_text(json.dumps(config))
    version = repository / NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "shoal"\n')
    settings = {
        "weights": str(weights),
        "dtype": "float32",
        "images": True,
        "max_num_seqs": 4,
        "num_kv_blocks": 200,
    }
    (version / "model.yaml").write_text(yaml.safe_dump(settings))
