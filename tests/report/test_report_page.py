"""The report of a comparison: whole, self-contained, escaped, deterministic, and honest in its words."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from entasis.errors import EntasisError
from entasis.report.comparison import render_report, write_report
from entasis.report.schema import Comparison
from entasis.report.wording import scope
from entasis.study.statistics import paired_difference

BuildComparison = Callable[..., Comparison]

FAMILIES = ("uniform", "prism", "bowtie", "diamond", "growing", "narrowing", "openelm", "tapered")
SECTIONS = (
    "verdict",
    "scope",
    "shapes",
    "budgets",
    "learning-rates",
    "curves",
    "final",
    "speed",
    "samples",
    "reproduce",
)
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is closed in the wrong place."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.identifiers: list[str] = []
        self._open: list[str] = []
        self._text: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.identifiers += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._text.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self._text))


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tuned": {"tuned": True, "exploratory": False},
    "one shape": {"families": ("uniform",)},
    "one shape, tuned": {"families": ("uniform",), "tuned": True},
    "one seed": {"seeds": (7,)},
    "two shapes": {"families": ("uniform", "bowtie"), "seeds": (0, 1)},
    "unequal": {"match_tolerance": 1e-5, "style": "gpt2"},
    "encoders": {"mask_share": 0.3, "tuned": True},
    "one encoder": {"families": ("uniform",), "mask_share": 0.15, "seeds": (3,)},
    "eight": {"families": FAMILIES, "tuned": True, "seeds": (0, 1, 2, 3, 4)},
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_whole_self_contained_page(build: BuildComparison, case: str) -> None:
    results = build(**CASES[case])
    html = render_report(results)
    page = Page(html)
    assert len(html.encode()) < 400_000
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|javascript:", html)
    assert "script" not in page.tags
    assert not {"img", "link", "iframe", "object"} & set(page.tags)
    references = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in references)
    targets = {value.lstrip("#") for value in references if value} | set(re.findall(r"url\(#([^)]+)\)", html))
    assert targets <= set(page.identifiers)
    assert len(page.identifiers) == len(set(page.identifiers))
    expected = [section for section in SECTIONS if section != "samples" or "mask_share" not in CASES[case]]
    assert [section for section in SECTIONS if section in page.identifiers] == expected
    assert ("differences" in page.identifiers) == (len(results["shapes"]) > 1)
    assert [s.text for s in scope(results) if words(s.text) not in page.text] == []
    assert ("nothing to compare it with" in page.text) == (len(results["shapes"]) == 1)
    assert "{{" not in html and "None" not in page.text and "nan" not in page.text.lower().split()


def test_a_page_of_encoders_speaks_of_masked_tokens_and_gives_no_bits_per_byte(build: BuildComparison) -> None:
    html = render_report(build(mask_share=0.3, tuned=True))
    text = Page(html).text
    for expected in (
        "Final held-out masked-token loss against uniform",
        "nats per masked token below uniform",
        "Masked-token loss. These are encoders: 30 % of the tokens are masked",
        "Loss (nats per masked token)",
        "Objectivemasked tokens, 30 %",
    ):
        assert expected.replace(" %", "\N{NO-BREAK SPACE}%") in text or expected in text, expected
    per_token = re.findall(r"nats per (?!masked)\w+", unescape(html), flags=re.IGNORECASE)
    assert per_token == []
    assert html.lower().count("bits per byte") == 1, "where it says that there is none"
    for absent in ("unigram", "KV cache", "decoded token", "In the beginning", "None"):
        assert absent not in text
    causal = Page(render_report(build())).text
    assert "masked" not in causal
    assert "Objectivenext token" in causal


def test_verdicts_stand_first_and_whole(build: BuildComparison) -> None:
    results = build(seeds=(0, 1, 2, 3))
    text = Page(render_report(results)).text
    sentences = [shape["difference"]["sentence"] for shape in results["shapes"].values() if shape["difference"]]
    assert len(sentences) == 2
    assert any(sentence.startswith("No difference shown: the 95 % interval") for sentence in sentences)
    assert any(sentence.startswith("Lower loss: ") for sentence in sentences)
    for sentence in sentences:
        assert 0 < text.index(words(sentence)) < text.index("What this comparison is, and is not")


@pytest.mark.parametrize(
    ("options", "present", "absent"),
    [
        (
            {},
            ["early learning speed, not of quality", "One shared learning rate, not tuned per shape"],
            ["Outside the"],
        ),
        (
            {"tuned": True, "exploratory": False},
            ["Learning rates are tuned per shape", "with seed 100", "The best rate of bowtie is at the edge"],
            ["early learning speed", "One shared learning rate"],
        ),
        ({"seeds": (4,)}, ["One seed (4).", "no difference is shown"], ["paired seeds", "What the intervals cover"]),
        ({"seeds": (4, 9)}, ["2 paired seeds (4, 9).", "are not corrected for multiple comparisons"], ["One seed"]),
        ({"match_tolerance": 1e-4}, ["Outside the tolerance.", "bowtie is more than 0.01 % off"], ["prism is more"]),
        ({}, ["Matched by effective parameters.", "Further off (ratio to the reference): KV cache per token 0.9"], []),
        ({"families": ("uniform",)}, ["3 seeds (0, 1, 2)."], ["paired seeds", "Matched by"]),
    ],
)
def test_the_box_says_what_the_study_is(
    build: BuildComparison, options: dict[str, Any], present: list[str], absent: list[str]
) -> None:
    text = " ".join(f"{statement.lead} {statement.text}" for statement in scope(build(**options)))
    assert [piece for piece in present if piece not in text] == []
    assert [piece for piece in absent if piece in text] == []


def test_identical_and_spreadless_differences_and_hopeless_tuning_are_drawn(build: BuildComparison) -> None:
    results = build(tuned=True)
    losses = [run["final_val_loss"] for run in results["shapes"]["uniform"]["runs"]]
    results["shapes"]["prism"]["runs"] = results["shapes"]["uniform"]["runs"]
    results["shapes"]["prism"]["difference"] = paired_difference(losses, losses)
    results["shapes"]["bowtie"]["difference"] = paired_difference([loss + 0.5 for loss in losses], losses)
    for point in results["shapes"]["bowtie"]["tuning"]:
        point["final_val_loss"] = None
    text = Page(render_report(results)).text
    assert "Identical: this shape and the reference end at exactly the same loss with every seed." in text
    assert "Without any spread between the seeds there is no interval" in text


def test_names_samples_and_titles_cannot_break_out(build: BuildComparison) -> None:
    names = {
        "uniform": "<b>x</b>",
        "prism": '"><script>alert(1)</script>',
        "bowtie": "$\\frac{a}{b}$ shape-placeholder-0- 나비",
    }
    results = build(names=names, sample="</p><script>alert(2)</script>\x00\x1b[31m & \udc80 end", tuned=True)
    results["title"] = "</title><script>alert(3)</script>"
    results["data"]["name"] = "<img src=x onerror=alert(4)>"
    results["environment"]["<i>"] = ["<u>"]
    results["config"]["<s>"] = "</pre><em>"
    results["command"] = "entasis compare '<tt>'"
    page = Page(render_report(results))
    assert not {"script", "img", "i", "u", "s", "em", "tt", "b"} & set(page.tags)
    for name in names.values():
        assert name in page.text
    assert "␀␛[31m & " in page.text
    assert page.text.count("</title><script>alert(3)</script>") == 2


def test_text_that_turns_its_surroundings_around_is_made_visible(build: BuildComparison) -> None:
    html = render_report(build(names={"bowtie": "bow\u202etie\u2066"}, sample="\u202e reversed"))
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08]", html)
    assert "bow\ufffdtie\ufffd" in html


def test_lone_surrogates_and_huge_samples_are_written(build: BuildComparison, tmp_path: Path) -> None:
    results = build(families=FAMILIES, sample="x\udc80" * 50_000)
    write_report(results, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_equal_results_give_equal_bytes_in_another_process(build: BuildComparison, tmp_path: Path) -> None:
    results = build(tuned=True)
    (tmp_path / "results.json").write_text(json.dumps(results))
    write_report(results, tmp_path / "here.html")
    program = (
        "import json, pathlib, sys; from entasis.report.comparison import write_report; p = pathlib.Path(sys.argv[1]);"
        "write_report(json.loads((p / 'results.json').read_text()), p / 'there.html')"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_writing_leaves_the_results_alone_and_nothing_beside_the_report(build: BuildComparison, tmp_path: Path) -> None:
    results = build()
    before = copy.deepcopy(results)
    write_report(results, tmp_path / "new" / "report.html")
    write_report(results, tmp_path / "new" / "report.html")
    assert results == before
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_ends_in_one_line(build: BuildComparison, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(EntasisError, match=r"report\.html: the report cannot be written") as caught:
        write_report(build(), tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_results_of_another_format_or_without_runs_are_refused(build: BuildComparison) -> None:
    other = build()
    other["format"] = "entasis-comparison-0"
    with pytest.raises(EntasisError, match="entasis-comparison-0"):
        render_report(other)
    missing = build()
    missing["shapes"]["prism"]["runs"] = []
    with pytest.raises(EntasisError, match="'prism' has no evaluation"):
        render_report(missing)
    unfinished = build()
    unfinished["shapes"]["prism"]["runs"][1]["curve"] = []
    with pytest.raises(EntasisError, match="'prism' has no evaluation"):
        render_report(unfinished)
    lost = build()
    lost["reference"] = "nobody"
    with pytest.raises(EntasisError, match="'nobody' is not among the shapes"):
        render_report(lost)


def test_tables_hold_the_numbers_of_the_results(build: BuildComparison) -> None:
    results = build()
    text = unescape(Page(render_report(results)).text)
    bowtie = results["shapes"]["bowtie"]
    assert bowtie["difference"] is not None
    for expected in (
        f"{bowtie['mean_val_loss']:.4f}",
        f"{bowtie['mean_bits_per_byte']:.4f}",
        f"{results['data']['unigram_bits_per_byte']:.3f}",
        f"{bowtie['reach']['steps']:.0f}",
        f"{bowtie['tokens_per_second_ratio']:.3f}×",
        f"{bowtie['ratio']['kv_cache_bytes_per_token']:.3f}×",
        f"{bowtie['difference']['p_value']:.3f}",
        results["data"]["fingerprint"],
        results["command"],
        "not reached",
        "In the beginning",
        "AMD EPYC",
    ):
        assert expected in text
