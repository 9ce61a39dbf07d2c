"""Several sources as one: what they must share, and what is known of the mixture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from entasis.data.dataset import Part, TokenSource
from entasis.data.mix import Mix
from entasis.data.mixture import MixedSplit
from entasis.data.stream import BatchStream
from entasis.data.token_split import TokenSplit
from entasis.data.tokenizers import Tokenizer
from entasis.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedData(TokenSource):
    """Sources with weights."""

    mixed: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """See `TokenSource`."""
        return self.mixed

    def tokenizer(self) -> Tokenizer | None:
        """See `TokenSource`: the one that all sources share."""
        return self.mixed[0].source.tokenizer()


def mix_sources(sources: Sequence[TokenSource], weights: Sequence[float]) -> TokenSource:
    """One source of several; names that occur twice are numbered.

    Raises:
        ConfigError: two sources were made with different tokenizers or vocabularies.
    """
    first = sources[0]
    for number, source in enumerate(sources[1:], start=1):
        for what, own, other in (
            ("a vocabulary of", first.vocab_size, source.vocab_size),
            ("end token", first.eos_id, source.eos_id),
            ("tokenizer", first.tokenizer_fingerprint, source.tokenizer_fingerprint),
        ):
            if own != other:
                raise ConfigError(
                    f"data.mixture.{number}: {source.path} has {what} {other}, and {first.path} has {own}; the sources "
                    "of a mixture must be made with one tokenizer"
                )
    shares = [float(share) for share in Mix(weights, 0).shares]
    names = [source.name for source in sources]
    parts = tuple(
        Part(f"{name} {number}" if names.count(name) > 1 else name, share, source)
        for number, (name, share, source) in enumerate(zip(names, shares, sources, strict=True), start=1)
    )
    bytes_per_token = [source.bytes_per_token for source in sources]
    return MixedData(
        path=first.path,
        name=" + ".join(part.name for part in parts),
        vocab_size=first.vocab_size,
        eos_id=first.eos_id,
        fingerprint=_fingerprint(sources, weights),
        train=MixedSplit([_one(source.train) for source in sources], weights),
        held_out=MixedSplit([_one(source.held_out) for source in sources], weights),
        request={"mixture": [{"name": part.name, "weight": part.weight} | part.source.request for part in parts]},
        files=tuple(file for source in sources for file in source.files),
        tokenizer_name=first.tokenizer_name,
        tokenizer_fingerprint=first.tokenizer_fingerprint,
        bytes_per_token=None
        if None in bytes_per_token
        else sum(share * (each or 0) for share, each in zip(shares, bytes_per_token, strict=True)),
        mixed=parts,
    )


def source_progress(stream: BatchStream, data: TokenSource, step: int) -> dict[str, dict[str, float]]:
    """Of a mixture, the tokens that each source gave before `step`, and how often it was gone through; else nothing."""
    if not isinstance(data, MixedData):
        return {}
    names = [part.name for part in data.parts]
    tokens = [sequences * stream.context for sequences in stream.sequences(step)]
    return {
        "source_tokens": dict(zip(names, tokens, strict=True)),
        "source_epochs": dict(zip(names, stream.epochs(step), strict=True)),
    }


def _one(split: TokenSplit | MixedSplit) -> TokenSplit:
    assert isinstance(split, TokenSplit), "mixtures are not nested"
    return split


def _fingerprint(sources: Sequence[TokenSource], weights: Sequence[float]) -> str:
    shares = [str(share) for share in Mix(weights, 0).shares]
    facts = ["entasis mixture", 1, [source.fingerprint for source in sources], shares]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
