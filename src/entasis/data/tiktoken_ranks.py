"""tiktoken's encodings as `tokenizer.json`: ranks become merges, so that one kind of tokenizer is kept and run.

Within a word, tiktoken joins the two neighbours whose joined bytes have the lowest rank, and again until none have one.
As long as the borders of a token stand, what is around them does not change how the bytes between them are joined. So
each token has one last pair, which is found by joining its bytes alone; these pairs, by rank, are the merges.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from entasis.data.tokenizers import BPE_EOS, FileTokenizer
from entasis.errors import ConfigError, EntasisError

PREFIX = "tiktoken:"
_SUFFIX = ".tiktoken"
Ranks = Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a rank file does not say: how text is cut into words, and the control tokens."""

    pattern: str
    """For the regular expressions of the tokenizers library: what tiktoken writes as `$` is `\\z` there."""
    special: tuple[str, ...]
    """Control tokens, which get the ids after the last rank."""
    eos: str
    sha256: str
    """Of the published rank file."""


_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_GPT2 = Encoding(_GPT2_WORDS, (BPE_EOS,), BPE_EOS, "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930")
ENCODINGS = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    # As the ><former recipe converts it: end of document 100261 and padding 100262 after tiktoken's own control tokens.
    "cl100k_base": Encoding(
        _CL100K_WORDS,
        (BPE_EOS, *_MIDDLE, "<|endofprompt|>", "<|eos|>", "<|pad|>"),
        "<|eos|>",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Encoding(
        _O200K_WORDS,
        (BPE_EOS, "<|endofprompt|>"),
        BPE_EOS,
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
}


def open_tiktoken(spec: str) -> FileTokenizer:
    """The tokenizer of `tiktoken:NAME`, `tiktoken:FOLDER/NAME.tiktoken` or `tiktoken:FOLDER`.

    The ranks of a name come from `NAME.tiktoken` in the folder TIKTOKEN_CACHE_DIR, else from tiktoken's own cache, else
    from the network.

    Raises:
        ConfigError: there is no such encoding or file, or it is damaged.
        EntasisError: the ranks are neither here nor can they be fetched.
    """
    given = spec.removeprefix(PREFIX)
    if given in ENCODINGS:
        cached = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or ".", given + _SUFFIX)
        if not ("TIKTOKEN_CACHE_DIR" in os.environ and cached.is_file()):
            return _tokenizer(given, _rank_file(_fetch(given)), f"{PREFIX}{given}")
        return _open_file(cached)
    path = Path(given)
    if path.is_dir():
        path = _only_rank_file(path)
    if path.name.removesuffix(_SUFFIX) not in ENCODINGS or not path.name.endswith(_SUFFIX):
        raise ConfigError(
            f"--tokenizer: {spec}: expected {PREFIX} and {', '.join(ENCODINGS)}, or a file or folder of NAME{_SUFFIX}, "
            "where NAME, one of these, tells how text is cut into words"
        )
    return _open_file(path)


def _only_rank_file(folder: Path) -> Path:
    found = [folder / f"{name}{_SUFFIX}" for name in ENCODINGS if (folder / f"{name}{_SUFFIX}").is_file()]
    if len(found) != 1:
        what = f"several rank files ({', '.join(path.name for path in found)})" if found else "no rank file"
        raise ConfigError(f"--tokenizer: {folder} holds {what}; name a file: {PREFIX}{folder}/NAME{_SUFFIX}")
    return found[0]


def _open_file(path: Path) -> FileTokenizer:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer: {path}: cannot be read ({error.strerror})") from error
    name = path.name.removesuffix(_SUFFIX)
    shown = f"{PREFIX}{name}"
    if hashlib.sha256(content).hexdigest() != ENCODINGS[name].sha256:
        shown += " (not the published ranks)"
    try:
        return _tokenizer(name, content, shown)
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"--tokenizer: {path}: not a rank file of tiktoken ({error})") from error


def _fetch(name: str) -> Ranks:
    """Ranks by tiktoken's own loading, which checks the checksum and keeps a copy."""
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    try:
        ranks: Ranks = ENCODING_CONSTRUCTORS[name]()["mergeable_ranks"]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise EntasisError(
            f"--tokenizer: {PREFIX}{name}: fetching its ranks needs the network once ({reason}); without it, give a "
            f"folder that holds {name}{_SUFFIX}: {PREFIX}FOLDER"
        ) from error
    return ranks


def _rank_file(ranks: Ranks) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def _parse(content: bytes) -> dict[bytes, int]:
    """Ranks of a rank file: lines of a token in base 64, a blank and a number.

    Raises:
        ValueError: it is not laid out so, its numbers are not 0, 1, 2, ..., or a byte has none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"line {number} is no token with its rank")
        token = base64.b64decode(parts[0], validate=True)
        if token in ranks:
            raise ValueError(f"line {number} names a token for the second time")
        ranks[token] = int(parts[1])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"byte {missing[0]} has no rank")
    return ranks


def _tokenizer(name: str, content: bytes, shown: str) -> FileTokenizer:
    return FileTokenizer(Backend.from_str(_convert(name, content)), shown, ENCODINGS[name].eos)


@lru_cache(maxsize=1)  # a preparation opens its tokenizer twice, and a conversion takes seconds
def _convert(name: str, content: bytes) -> str:
    """`tokenizer.json` of an encoding with the ranks of a rank file."""
    ranks = _parse(content)
    encoding = ENCODINGS[name]
    letters = _letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = (_last_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [(written[left], written[right]) for left, right in filter(None, pairs)]
    # tiktoken looks a whole word up before it joins anything.
    model = models.BPE({written[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(encoding.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(encoding.special))
    text: str = backend.to_str()
    return text


def _last_pair(token: bytes, ranks: Ranks) -> tuple[bytes, bytes] | None:
    """The two tokens that are joined last to make `token`; None if joining its bytes never makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        lowest = min(joined)
        if lowest == len(ranks):
            return None
        first = joined.index(lowest)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]


def _letters() -> list[str]:
    """The letter for each byte in byte-level vocabularies: the byte itself if it can be seen, else from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
