"""From the section `data` of a configuration to what a run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from entasis.data.dataset import TokenData, TokenSource
from entasis.data.foreign import open_foreign
from entasis.data.mixed import mix_sources
from entasis.data.remote import fetch_prepared, is_remote
from entasis.errors import ConfigError
from entasis.run.sections import DataSection, SourceSection


def open_data(section: DataSection, say: Callable[[str], None] = lambda _: None) -> TokenSource:
    """Opens all sources, remote ones after a copy of them is made; `say` is told in lines what takes time or matters.

    Raises:
        ConfigError: a setting does not fit the data, or the sources do not fit each other.
        EntasisError: data is missing or damaged; the line names the file.
    """
    sources = [_open(source, section, say) for source in section.sources]
    for source in sources:
        if section.vocab_size not in {None, source.vocab_size}:
            raise ConfigError(
                f"data.vocab_size: the configuration says {section.vocab_size}, the data in {source.path} has "
                f"{source.vocab_size}; prepare it with the right tokenizer, or set data.vocab_size=null"
            )
    return sources[0] if section.mixture is None else mix_sources(sources, [each.weight for each in section.mixture])


def _open(source: SourceSection, section: DataSection, say: Callable[[str], None]) -> TokenSource:
    if source.format == "entasis":
        folder = fetch_prepared(source.path, section.cache, say) if is_remote(source.path) else Path(source.path)
        return TokenData.open(folder)
    if is_remote(source.path):
        raise ConfigError(
            f"data.path: {source.path}: of remote data only prepared folders are read; copy the files here"
        )
    assert section.vocab_size is not None
    opened = open_foreign(
        source.format,
        source.path,
        vocab_size=section.vocab_size,
        held_out=source.held_out,
        eos_id=source.eos_id,
    )
    if not isinstance(source.held_out, str):
        total = opened.train.tokens + opened.held_out.tokens
        say(f"{source.path}: {opened.request['held_out'][0]} of {total:,} are held out")
    return opened
