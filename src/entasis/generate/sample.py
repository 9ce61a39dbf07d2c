"""Continuing a prompt, one token at a time. The whole context is computed anew for each token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from entasis.data.tokenizers import Tokenizer
from entasis.errors import ConfigError
from entasis.model.transformer import Transformer
from entasis.settings import is_text


@torch.no_grad()
def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """The prompt and its continuation, up to `tokens` tokens or the end of the document.

    The prompt starts a document: before it stands the token that closes documents, as in training. The model sees the
    last `context` tokens. The same arguments give the same text on the same machine.

    Args:
        model: on the device where it should run.
        tokenizer: of the run.
        prompt: may be empty.
        tokens: most tokens to add.
        temperature: 0: always the likeliest token.
        top_k: only the k likeliest tokens are drawn from; None: all.
        seed: of the draws.

    Raises:
        ConfigError: a setting is out of range, or the model is an encoder; names it.
    """
    if not model.config.causal:
        raise ConfigError("causal: false: an encoder has not learned to continue a text; train a causal model for that")
    if not is_text(prompt):
        raise ConfigError("prompt: not text that can be written as UTF-8")
    if tokens < 0:
        raise ConfigError(f"tokens: expected at least 0, got {tokens}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: expected at least 1, got {top_k}")
    device = model.head_weight.device
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed: expected from 0 to 2^63 - 1, got {seed}")
    random = torch.Generator().manual_seed(seed)
    ids = [tokenizer.eos_id, *tokenizer.encode_batch([prompt])[0]]
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.context :]], device=device)
        logits = torch.nn.functional.linear(model.hidden(window)[0, -1], model.head_weight).float().cpu()
        chosen = _draw(logits, temperature, top_k, random)
        if chosen == tokenizer.eos_id:
            break
        ids.append(chosen)
    return tokenizer.decode(ids[1:])


def _draw(logits: Float[Tensor, " vocab"], temperature: float, top_k: int | None, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    # In float64, and the likeliest at zero: however small the temperature, nothing overflows.
    scaled = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=random))
