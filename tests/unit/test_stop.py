from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.gateway.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(p) for p in pieces)
    return text + matcher.finish(), matcher.matched


def test_a_stop_string_across_pieces_is_cut_out_and_nothing_of_it_is_shown_before() -> None:
    matcher = StopMatcher(["###END"])
    assert [matcher.push(p) for p in ("Paris", " #", "##", "EN", "D and more")] == ["Paris", " ", "", "", ""]
    assert matcher.matched == "###END"
    assert matcher.push("after") == "" and matcher.finish() == ""


def test_what_was_held_back_is_given_when_it_was_no_stop_string() -> None:
    matcher = StopMatcher(["###END"])
    assert matcher.push("a ##") == "a "
    assert matcher.push("#x") == "###x"
    assert matcher.push("##") == ""
    assert matcher.finish() == "##"


def test_the_one_that_completes_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")  # both complete together: the longer


def test_empty_stop_strings_match_nothing() -> None:
    assert run([""], ["abc"]) == ("abc", None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    by_character = run(stops, list(text))
    assert run(stops, pieces) == run(stops, [text]) == by_character
    # and it is what a search in the whole text says
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert by_character == expected
