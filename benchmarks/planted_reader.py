"""A reader whose behaviour is planted, to prove that a comparison finds what is there, and nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from warmprefix_tools.emulator.tokenizer import ChatMessage

__all__ = ["PlantedReader"]

_QUESTION = re.compile(r"What is the (?P<attribute>[\w ]+?) of (?P<entity>\S+)\?\s*$")
_CITES = "name the [label] of the passage"
_NOTE = re.compile(r"Most relevant above|priority order")
_LABEL = re.compile(r"^\[ctx-\w+\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PlantedReader:
    """Reads made-up questions in English, and answers some of them wrongly, for reasons that are set here.

    If the system prompt asks for it, an answer cites the label of its passage.

    Whether it fails at a question depends on the question alone, so that the same questions fail in all arms without a
    reason to differ; `noise` is the exception. All rates are shares from 0 to 1.
    """

    accuracy: float = 0.8
    """Share of right answers, before all that follows."""
    position_loss: float = 0.0
    """Loss with the passage in the middle, against the first or the last place."""
    note_loss: float = 0.0
    label_loss: float = 0.0
    reference_loss: float = 0.0
    """Loss where the question's turn has a reference in place of the passage."""
    noise: float = 0.0
    """Share of calls whose outcome is random instead."""
    seed: int = 0

    def answer(self, messages: Sequence[ChatMessage]) -> str:
        """Return the answer to the last question of the user, which a tool's result may follow."""
        prompt = "\n\n".join([message.text for message in messages])
        begin = max([at for at, message in enumerate(messages) if message.role == "user"], default=0)
        last = "\n\n".join([message.text for message in messages[begin:]])
        asked = _QUESTION.search(messages[begin].text)
        if asked is None:
            return "All of them."
        fact = re.compile(rf"The {re.escape(asked['attribute'])} of {re.escape(asked['entity'])} is (\w+)\.")
        found = fact.search(prompt)
        if found is None:
            return "unanswerable"
        share = found.start() / len(prompt)
        chance = self.accuracy - self.position_loss * 4 * share * (1 - share)
        chance -= self.note_loss * bool(_NOTE.search(last))
        chance -= self.label_loss * bool(_LABEL.search(last) and fact.search(last))
        chance -= self.reference_loss * (fact.search(last) is None)
        luck = _share("question", self.seed, asked[0])
        if _share("is noisy", self.seed, prompt) < self.noise:
            luck = _share("noise", self.seed, prompt)
        if luck >= chance:
            return "Nowhere"
        labels = _LABEL.findall(prompt, 0, found.start()) if _CITES in prompt else []
        return f"{found[1]} {labels[-1]}" if labels else found[1]


def _share(*about: object) -> float:
    """Return a number from 0 to 1 that depends on nothing else."""
    digest = blake2b(repr(about).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
