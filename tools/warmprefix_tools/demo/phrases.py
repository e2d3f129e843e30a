"""What people would say about an entry, in the words of its own docstring."""

from __future__ import annotations

import re

from warmprefix_tools.demo.corpus import Entry

__all__ = ["goal", "remarks", "spoken_name"]

_VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        add allow append apply arrange ask assert attach bind block build call cancel change check choose clear close
        collect combine compare compile complete compute configure connect construct convert copy count create decode
        decompress delete describe detect determine disable display divide download draw dump emit enable encode
        escape evaluate execute expand extract fetch fill filter find fix flush forget format generate get guess
        handle import indicate initialize insert install invoke iterate join list load locate log look make map merge
        modify move open override pack parse place plot pop prepare print process put query quote raise read receive
        record recursively redirect register release reload remove rename render replace report request reset resolve
        restore retrieve reverse rotate round run save scan schedule search seek select send serialize set show shut
        shuffle shutdown simulate sleep sort split start stop store strip submit suspend swap take terminate test
        transform translate truncate try turn undo unpack unregister update upload use validate verify wait walk wrap
        write yield
        """,
    )
)
_SENTENCE_END = re.compile(r"[.:;](?=\s|$)|\s\(|\s--?\s")
_PLAIN = re.compile(r"[A-Za-z][\w ,.'/*-]*", re.ASCII)
_LONGEST_GOAL = 80
_REMARK = re.compile(r"(?<=[.!?:])\s+([A-Z][\w ,'()=-]{30,110})\.(?=\s|$)", re.ASCII)


def goal(entry: Entry) -> str | None:
    """What a function's first sentence says it achieves, to follow "How do I"; None if it says it otherwise.

    A "Return the ..." becomes "get the ...".
    """
    if entry.kind != "function":
        return None
    sentence = _SENTENCE_END.split(" ".join(entry.docstring.split("\n\n")[0].split()))[0]
    sentence = sentence.replace("`", "").replace('"', "")
    verb, _, rest = sentence.partition(" ")
    verb = verb.lower()
    verb = verb if verb in _VERBS or verb == "return" else verb.removesuffix("s")
    if not len(rest.split()) > 1 or len(sentence) > _LONGEST_GOAL or not _PLAIN.fullmatch(sentence):
        return None
    if verb == "return":
        return None if rest.startswith(("True", "true")) else f"get {rest}"
    return f"{verb} {rest}" if verb in _VERBS else None


def remarks(entry: Entry) -> list[str]:
    """Sentences of its docstring after the first, short and plain enough to be quoted."""
    return _REMARK.findall(" ".join(entry.docstring.split()))


def spoken_name(entry: Entry) -> str:
    """The name as people write it: `ElementTree.indent`, not `xml.etree.ElementTree.indent`."""
    return ".".join(entry.name.split(".")[-2:])
