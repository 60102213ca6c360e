"""The rig of conversations: a tokenizer with special tokens, and templates as families of models have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END, START = "<|im_end|>", "<|im_start|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GENERATION = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
THINKS = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
)
"""Rewrites earlier turns."""
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "fine, thanks."},
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "four"},
]


@cache
def chat_tokenizer() -> bytes:
    """Return the JSON of a tokenizer that knows a few words and ChatML's tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = ["hello there, how are you? fine, thanks. what is two plus two? four. user assistant system"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|endoftext|>", START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend.to_str().encode()


def write_model(into: Path, template: Any = CHATML, **config: Any) -> Path:
    """Write a model's tokenizer and its config, as models have them; return the tokenizer's path."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "tokenizer.json").write_bytes(chat_tokenizer())
    named = {"bos_token": "<s>", "eos_token": {"content": END}, "chat_template": template} | config
    (into / "tokenizer_config.json").write_text(json.dumps(named))
    return into / "tokenizer.json"
