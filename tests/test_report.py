"""Output of commands: streamed text and tables."""

import io
import re

import pytest
from rich.console import Console

import specjax
from specjax.cli import jsonl
from specjax.engine.request import Completion, Generation
from specjax.report import stream as streams
from specjax.report import tables
from support.cli import write_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return specjax.load(write_model(tmp_path_factory.mktemp("model") / "target"))


def terminal() -> Console:
    return Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="standard",
        width=120,
        highlight=False,
    )


class TestTextStream:
    """Streamed text on a terminal."""

    def test_drafts_have_a_colour_of_their_own(self, target):
        ids = target.tokenizer.encode("hello world", add_special_tokens=False)
        hello, rest = (
            target.tokenizer.decode(ids[:1]),
            [target.tokenizer.decode([i]) for i in ids[1:]],
        )
        console = terminal()
        stream = streams.TextStream(console, target, ["> title"])
        stream.on_tokens(0, ids[:1], [False], False)
        assert hello in console.export_text(clear=False), "text is shown as it comes"
        stream.on_tokens(0, ids[1:], [True] * len(rest), True)
        green, cyan = "\x1b[32m", "\x1b[36m"
        shown = console.export_text(styles=True)
        assert "\x1b[1m> title\x1b[0m" in shown
        assert f"{cyan}{hello}\x1b[0m" + "".join(f"{green}{text}\x1b[0m" for text in rest) in shown

    def test_texts_come_in_the_order_of_the_prompts(self, target):
        texts = ["hello world", "a é and 日本", "third"]
        ids = [target.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        console = terminal()
        stream = streams.TextStream(console, target, ["> one", "> two", "> three"], legend=False)

        def push(index, start, stop, finished):
            stream.on_tokens(
                index, ids[index][start:stop], [start % 2 == 0] * (stop - start), finished
            )

        push(1, 0, 4, False)  # an incomplete character
        push(0, 0, 1, False)
        push(1, 4, len(ids[1]), True)
        seen = console.export_text(clear=False)
        assert "hello" in seen
        assert "two" not in seen
        assert "and" not in seen
        push(2, 0, 2, False)
        push(0, 1, len(ids[0]), True)
        seen = console.export_text(clear=False)
        assert "a é and 日本" in seen, "the second was complete when the first ended"
        assert seen.endswith("> three\nth")
        push(2, 2, len(ids[2]), True)
        assert (
            console.export_text()
            == "> one\nhello world\n\n> two\na é and 日本\n\n> three\nthird\n\n"
        )

    def test_nothing_is_printed_before_the_first_tokens(self, target):
        """So no output precedes the error of an invalid option."""
        console = terminal()
        stream = streams.TextStream(console, target, ["> a"])
        assert console.export_text(clear=False) == ""
        stream.on_tokens(0, target.tokenizer.encode("b", add_special_tokens=False), [True], True)
        assert console.export_text() == "accepted drafts  the target's bonus tokens\n\n> a\nb\n\n"

    def test_markup_in_a_text_is_printed_verbatim(self, target):
        text = "[red]x[/red] [0] :smile:"
        console = terminal()
        stream = streams.TextStream(console, target, ["> [bold]a"], legend=False)
        ids = target.tokenizer.encode(text, add_special_tokens=False)
        stream.on_tokens(0, ids, [False] * len(ids), True)
        assert console.export_text() == f"> [bold]a\n{text}\n\n"

    def test_an_incomplete_character_at_the_end_is_printed(self, target):
        ids = target.tokenizer.encode("日", add_special_tokens=False)[:2]
        console = terminal()
        streams.TextStream(console, target, ["> a"], legend=False).on_tokens(
            0, ids, [False, True], True
        )
        assert console.export_text() == f"> a\n{target.tokenizer.decode(ids)}\n\n"


CONTROLS = "a\tb\r\n\x1b[2J\x07 \x9b1m\x7f é"


def test_control_characters_are_escaped_on_terminals():
    console = terminal()
    streams.print_text(console, CONTROLS)
    shown = "a\tb\\x0d\n\\x1b[2J\\x07 \\x9b1m\\x7f é"
    assert console.export_text() == shown
    assert console.file.getvalue() == shown


def test_control_characters_are_written_to_files_verbatim():
    console = Console(file=io.StringIO(), width=10)
    streams.print_text(console, CONTROLS)
    assert console.file.getvalue() == CONTROLS


def test_a_stream_escapes_control_characters(target):
    console = terminal()
    stream = streams.TextStream(console, target, ["> \x1b]0;title\x07"], legend=False)
    ids = target.tokenizer.encode("x\ty\x1b[31m", add_special_tokens=False)
    stream.on_tokens(0, ids, [False] * len(ids), True)
    assert console.export_text() == "> \\x1b]0;title\\x07\nx\ty\\x1b[31m\n\n"


def test_speed_table():
    def generation(seconds, *rounds):
        drafted, accepted, emitted = zip(*rounds, strict=True)
        count = sum(emitted)
        return Generation(
            (Completion((1,), (7,) * count, None, "length", drafted, accepted, emitted),),
            1.0,
            seconds,
            len(rounds),
        )

    plain = [generation(2.0, *[(0, 0, 1)] * 20)]
    speculative = [
        generation(0.5, (3, 3, 4), (3, 1, 2), (3, 0, 1), (0, 0, 1)),
        generation(0.5, *[(3, 3, 4)] * 3),
    ]
    console = terminal()
    console.print(
        tables.speed_table(
            "title", {"plain": plain, "speculative": speculative}, {"speculative": 3}
        )
    )
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "title"
    cells = (re.split(r"  +", line.replace("│", "  ").strip()) for line in lines[2:])
    rows = {name: values for name, *values in cells}
    assert rows["tokens"] == ["20", "20"]
    assert rows["tokens/s"] == ["10.0", "20.0"]
    assert rows["rounds"] == ["20", "7"]
    assert rows["tokens per round"] == ["1.00", f"{20 / 7:.2f}"]
    assert rows["time per round"] == ["100.0 ms", f"{1000 / 7:.1f} ms"]
    assert rows["K, most drafts per round"] == ["3"] and rows["rounds with drafts"] == ["6"]
    alpha = 13 / 15  # thirteen accepted, two rejected
    assert rows["acceptance α of drafts tested"] == [f"{alpha:.3f}"]
    assert rows["tokens per round with drafts"] == [f"{19 / 6:.2f}"]
    assert rows["E = (1-α^(K+1))/(1-α) predicts"] == [f"{(1 - alpha**4) / (1 - alpha):.2f}"]
    assert rows["accepted at draft position 1, 2, ..."] == ["0.83 0.67 0.67"]
    assert rows["cost of a round, in plain steps"] == [f"{10 / 7:.2f}"]
    assert rows["speedup"] == ["2.00x"]


def test_headlines_are_one_line():
    assert jsonl.headline("one") == "> one"
    assert jsonl.headline("\none\ntwo") == "> one ..."
    assert jsonl.headline("x" * 101) == f"> {'x' * 100} ..."
    assert (
        jsonl.headline([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
        == "> u"
    )
