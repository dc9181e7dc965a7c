"""The prompts of the demo: texts to continue, of several lengths, some with a common beginning."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prompt", "prompts"]

_QUIZ = (
    "Short answers to the questions of a quiz.\n"
    "Question: What is the capital of Italy?\nAnswer: Rome\n"
    "Question: How many legs does a spider have?\nAnswer: Eight\n"
    "Question: "
)
_DICTIONARY = "A small dictionary from English to French.\nwater: eau\nhouse: maison\nbread: pain\n"
_NIGHT = (
    "It was late in the evening when the train stopped between two stations. Snow had covered the "
    "fields, and there was no light to be seen on either side. Nobody knew why it had stopped. "
    "A child asked whether they would have to sleep there. The conductor walked through the "
    "carriages, looked at the passengers one after another, and said"
)


@dataclass(frozen=True)
class Prompt:
    """A text for the model to continue.

    Attributes:
        text: the text.
        takes_one_line: the answer ends with its line.
    """

    text: str
    takes_one_line: bool = False


_PROMPTS = (
    Prompt(f"{_QUIZ}What is the capital of France?\nAnswer:", takes_one_line=True),
    Prompt("Once upon a time, in a small village by the sea, there lived"),
    Prompt(f"{_QUIZ}Which metal has the chemical symbol Fe?\nAnswer:", takes_one_line=True),
    Prompt(_NIGHT),
    Prompt(f"{_DICTIONARY}book:", takes_one_line=True),
    Prompt("The Eiffel Tower is"),
    Prompt(f"{_QUIZ}Who wrote Romeo and Juliet?\nAnswer:", takes_one_line=True),
    Prompt("Dear Anna,\n\nThank you for your letter. I was glad to hear that"),
    Prompt(f"{_DICTIONARY}dog:", takes_one_line=True),
    Prompt("def add(a, b):\n    return"),
    Prompt("The recipe is simple. First, boil the water and add"),
    Prompt("The most important thing about a good library is"),
)


def prompts(count: int, *, tiny: bool) -> list[Prompt]:
    """The first `count` prompts; after the last one they come again, each time longer.

    With `tiny` they are short, and all of them begin alike.
    """
    if tiny:
        return [Prompt(_QUIZ[:40] + _PROMPTS[index % 12].text[-24:]) for index in range(count)]
    found = []
    for index in range(count):
        rounds, place = divmod(index, len(_PROMPTS))
        prompt = _PROMPTS[place]
        found.append(Prompt(f"{prompt.text}\n\n" * rounds + prompt.text, prompt.takes_one_line))
    return found
