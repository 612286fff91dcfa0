"""Models and cards that calculations know by name.

Valid     shapes as published, weights and state in bf16 as the textbook counts them; peaks of `estimators.hardware`
          with half of both reached, and the bandwidth of the H20 as MegaScale-Infer prints it
Blind to  the fp8 weights that DeepSeek and Qwen publish: a fleet file or a config.json says what really runs
Source    config.json of Qwen/Qwen3-8B, Qwen/Qwen3-235B-A22B and deepseek-ai/DeepSeek-V3; MegaScale-Infer, arXiv
          2504.02263, table 3
"""

from __future__ import annotations

import msgspec

from estimators.hardware import CARDS, Card
from estimators.shape_parts import Experts, Latent
from estimators.shapes import QWEN3_8B, ModelShape

QWEN3_235B = ModelShape(
    name="Qwen/Qwen3-235B-A22B",
    layers=94,
    hidden=4096,
    intermediate=12288,
    heads=64,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    experts=Experts(count=128, chosen=8, intermediate=1536),
)

DEEPSEEK_V3 = ModelShape(
    name="deepseek-ai/DeepSeek-V3",
    layers=61,
    hidden=7168,
    intermediate=18432,
    heads=128,
    kv_heads=128,
    head_dim=56,
    vocab=129280,
    latent=Latent(rank=512, rope=64, nope=128, value=128, query_rank=1536),
    experts=Experts(count=256, chosen=8, intermediate=2048, shared_intermediate=2048, dense_layers=3),
)

MODELS: dict[str, ModelShape] = {"qwen3-8b": QWEN3_8B, "qwen3-235b": QWEN3_235B, "deepseek-v3": DEEPSEEK_V3}

REACHED = 0.5  # of both peaks: the textbook's convention, section 9.2.3


def _planned(card: Card) -> Card:
    return msgspec.structs.replace(card, compute_share=REACHED, memory_share=REACHED)


PLANNED_CARDS: dict[str, Card] = {
    **{name: _planned(card) for name, card in CARDS.items()},
    # 4096 GB/s, where the maker's sheet rounds to 4.0 TB/s
    "H20": _planned(msgspec.structs.replace(CARDS["H20"], memory_gb_s=4096)),
}
