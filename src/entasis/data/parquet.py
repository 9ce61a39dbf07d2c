"""Documents from a Parquet file: one column, a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entasis.errors import EntasisError

_ROWS = 256


def parquet_documents(path: Path, text_field: str) -> Iterator[str]:
    """The text of each row, in order. Pages are read as they are needed, so memory follows no row group's size.

    Raises:
        EntasisError: the file is damaged, lacks the column or holds no text in it, or pyarrow is missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EntasisError(f"{path}: reading .parquet needs pyarrow; run: pip install 'entasis[hub]'") from error
    row = 0
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            known = file.schema_arrow.names
            if text_field not in known:
                shown = ", ".join(known[:10]) or "none"
                raise EntasisError(f"{path}: no column {text_field!r} (it has: {shown}); choose one with --text-field")
            for batch in file.iter_batches(batch_size=_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    text = "" if not value.is_valid else value.as_py()  # an empty cell is a document without text
                    if not isinstance(text, str):
                        raise EntasisError(
                            f"{path}, row {row}: column {text_field!r} holds {batch.schema.field(0).type}, not text"
                        )
                    yield text
    except UnicodeDecodeError as error:
        raise EntasisError(f"{path}, row {row}: not UTF-8 (byte 0x{error.object[error.start]:02x})") from error
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise EntasisError(f"{path}: cannot be read ({error.strerror})") from error
        reason = " ".join(str(error).split())[:200]
        raise EntasisError(f"{path}: broken Parquet file ({reason})") from error
