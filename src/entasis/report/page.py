"""A report's page: the template filled, self-contained, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from entasis.errors import EntasisError
from entasis.report.ink import theme_variables

# Names and samples are anybody's text. Control characters become visible, and so do those that turn the direction of
# the text around them: they could make a verdict read otherwise than it says.
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(
        [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F], 0xFFFD
    )
)


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """The template of that name as HTML text, with the reports' style in `css`."""
    environment = _environment()
    css = environment.get_template("report.css").render(light=theme_variables(0), dark=theme_variables(1))
    page = environment.get_template(template).render({**context, "css": Markup(css)}).translate(_VISIBLE)
    return page.replace(" %", "\N{NO-BREAK SPACE}%")  # a number never ends a line without its sign


def write_page(page: str, path: Path) -> None:
    """Writes a rendered page to `path`, which is whole or untouched.

    Raises:
        EntasisError: the file cannot be written.
    """
    try:
        _write_whole(path, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise EntasisError(f"{path}: the report cannot be written ({error.strerror})") from error


def flat_record(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested record as `outer.inner` and text."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flat_record(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("entasis.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _write_whole(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename, so that nobody ever reads half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
