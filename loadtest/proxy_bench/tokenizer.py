"""A tokenizer and a chat template for made-up words: small, and slow and quick where real ones are.

Model     byte-pair merges learned from the bench's own texts, so that a word is one to three tokens, as it is in real
          vocabularies; a template of roles and line ends
Valid     texts of `bodies.py`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, texts: Sequence[str]) -> Path:
    """Learn from `texts`, and write what a model's directory holds; needs the `tokenizers` package."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
