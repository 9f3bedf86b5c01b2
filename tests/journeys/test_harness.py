"""The harness of the journeys: it finds the steps in a page, sees what is not as shown, and leaves nothing running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.journey import Journey
from tests.journeys.pages import Command, commands_of, prints, steps_of

PAGE = """# A page

<!-- journey: one -->
```console
$ export WORD=hello
$ echo "$WORD" \\
    you
hello you
```

```console
$ false  # of no journey
```

Write this:

<!-- journey: one -->
```python title="in/first.py"
print("written")
```

<!-- journey: one -->
```python
print("ran in 3.2 ms")
```

It says:

```text
ran in 1 ms
```

<!-- journey: two -->
```console
exit 3
```

<!-- journey: one, in another terminal, stays -->
```console
$ echo "${WORD:-nothing}"; python in/first.py
nothing
written
$ python -c "import time; print('up', flush=True); time.sleep(600)"
up
```
"""


@pytest.fixture
def page(empty_folder: Path) -> Path:
    folder = empty_folder / "pages"
    folder.mkdir()
    written = folder / "page.md"
    written.write_text(PAGE)
    return written


def test_steps_are_the_marked_blocks_in_their_order(page: Path) -> None:
    steps = steps_of("one", [page])
    assert [step.place for step in steps] == ["page.md:4", "page.md:18", "page.md:23", "page.md:39"]
    assert steps[0].commands == (
        Command("export WORD=hello", None),
        Command('echo "$WORD" \\\n    you', "hello you\n"),
    )
    assert (steps[1].file, steps[1].content) == ("in/first.py", 'print("written")\n')
    assert steps[2].commands[0].output == "ran in 1 ms\n"
    assert (steps[3].new_terminal, steps[3].stays) == (True, True)


def test_a_mark_with_an_unknown_word_is_an_error(page: Path) -> None:
    page.write_text(PAGE.replace("in another terminal", "elsewhere"))
    with pytest.raises(ValueError, match="elsewhere"):
        steps_of("one", [page])


def test_a_journey_that_no_page_has_is_an_error(page: Path) -> None:
    with pytest.raises(ValueError, match="three"):
        steps_of("three", [page])


def test_without_prompts_each_line_is_a_command() -> None:
    assert commands_of("# first\none \\\n  more\ntwo\n") == [Command("one \\\n  more", None), Command("two", None)]


def test_lines_behind_a_second_prompt_belong_to_the_command() -> None:
    assert commands_of("$ cat <<X\n> a\n> X\na\n") == [Command("cat <<X\na\nX", "a\n")]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 1.5 s", "took 312 s"),
        ("5.5 GB/s, pid 12", "0.25 GB/s, pid 99123"),
        ("id d88a09957b84", "id 00ff09957b84"),
        ("a … z", "a b c z"),
        ("first\n…\nlast", "first\n1\n2\nlast"),
        ("name    took\nx       1.0 s", "name  took\nx     10.25 s"),
        ("same  \n", "same"),
    ],
)
def test_what_varies_between_runs_may_differ(shown: str, printed: str) -> None:
    assert prints(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("12 blocks", "13 blocks"),
        ("hit", "miss"),
        ("a", "a\nb"),
        ("a … z", "a b"),
        ("first\n…\nlast", "first\nlast\nmore"),
        ("50 %", "49 %"),
    ],
)
def test_all_else_must_be_as_shown(shown: str, printed: str) -> None:
    assert not prints(shown, printed)


@pytest.mark.processes
def test_a_journey_does_what_the_page_says(page: Path, empty_folder: Path) -> None:
    folder = empty_folder / "user"
    folder.mkdir()
    with Journey("one", [page], folder, replace={"600": "60"}) as journey:
        journey.play()
        assert (journey.folder / "in" / "first.py").read_text() == 'print("written")\n'
    assert len(journey.took) == 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("was", "is_now", "said"),
    [
        ("hello you\n", "hello me\n", "page.md:4"),
        ("WORD=hello", "WORD=hello; false", "exit code 1"),
        ("ran in 1 ms", "ran in 1 hour", "the page shows"),
    ],
)
def test_what_is_not_as_the_page_says_is_named(
    page: Path, empty_folder: Path, was: str, is_now: str, said: str
) -> None:
    page.write_text(PAGE.replace(was, is_now))
    folder = empty_folder / "user"
    folder.mkdir()
    with pytest.raises(AssertionError, match=said), Journey("one", [page], folder) as journey:
        journey.play()


@pytest.mark.processes
def test_a_text_to_replace_that_no_page_has_is_an_error(page: Path, empty_folder: Path) -> None:
    folder = empty_folder / "user"
    folder.mkdir()
    with (
        pytest.raises(AssertionError, match=r"nowhere say other\.whl"),
        Journey("one", [page], folder, replace={"other.whl": "x"}) as journey,
    ):
        journey.play()
