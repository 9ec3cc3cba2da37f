"""Stop strings are cut exactly and never shown in part, however the text is cut into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fineinfer.text.stop_strings import StopMatcher

small_text = st.text(alphabet="ab漢", max_size=30)
stop_strings = st.lists(st.text(alphabet="ab漢", min_size=1, max_size=5), max_size=4)


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads character by character; the longest of several stop strings that end at the same place counts."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=small_text, stops=stop_strings, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_equals_reading_character_by_character(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    expected, stop = _reference(text, stops, include)
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += matcher.feed(text[start:end])
        # what is out is always a beginning of the final text: nothing of a stop string escaped early
        assert expected.startswith(shown)
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, stop)


def test_possible_beginning_is_held_and_released() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hi.\n\nUse") == "Hi."
    assert matcher.feed("ful") == "\n\nUseful"
    assert matcher.feed("\n\nUser") == ""
    assert matcher.feed(": more") == ""
    assert matcher.matched == "\n\nUser:"
    assert (matcher.feed("later"), matcher.flush()) == ("", "")


def test_held_text_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == "the "
    assert matcher.flush() == "EN"
