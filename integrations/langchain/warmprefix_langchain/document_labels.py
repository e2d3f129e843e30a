"""Documents as context blocks, and plans as annotated copies of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from warmprefix import ContextBlock, ContextPlan, PlannedBlock
from warmprefix.annotate import has_labels
from warmprefix_requests.neighbours import PinRule, SourcePlace, neighbours, pin_of, with_kept_places

__all__ = [
    "LABEL_KEY",
    "LEFT_OUT_KEY",
    "NOTE_KEY",
    "TEXT_KEY",
    "PromptDocuments",
    "ShownIn",
    "append_note",
    "arrange",
    "as_blocks",
    "as_list",
]

ShownIn = Literal["prompt", "content"]
"""Where a document shows its label and the note: in prompts only, or in its own text."""

LABEL_KEY = "context_label"
LEFT_OUT_KEY = "context_left_out"
NOTE_KEY = "context_note"
REFERENCE_KEY = "context_reference"
"""Metadata key, on a document that a reference replaces in the prompt, of the document's whole text."""
ESCAPED_KEY = "context_escaped"
"""Metadata key of True on a document whose text is escaped, because it could pass for a note."""
TEXT_KEY = "page_content"
"""`format_document` prints a metadata entry of this name in place of the document's own text."""


class PromptDocuments(NamedTuple):
    """Documents in planned order, and the order note."""

    documents: list[Document]
    note: str
    """Empty if the order needs none, or if none is written."""
    left_out: Sequence[Document] = ()
    """The candidates that are not fed, in relevance order."""


def as_list(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a new list.

    A single text, document or dict is refused: it would pass for a sequence of its parts.

    Raises:
        TypeError: `documents` is not a sequence of documents.
    """
    if isinstance(documents, str | Mapping | Document) or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be a sequence of Document, got one {type(documents).__name__}")
    return list(documents)


def as_blocks(
    documents: Sequence[Document],
    shown_in: ShownIn,
    pinned: PinRule[Document] | None = None,
    scores: Sequence[float | None] | None = None,
) -> list[ContextBlock]:
    """Return one block per document, with the text that the prompt would show. Neighbours in one source are linked."""
    texts = [document.page_content if shown_in == "content" else _prompt_text(document) for document in documents]
    places = [SourcePlace.of_metadata(document.metadata, len(document.page_content)) for document in documents]
    blocks: list[ContextBlock] = []
    followed = neighbours(places, texts, SourcePlace.continues)
    found = [None] * len(documents) if scores is None else scores
    for document, text, before, score in zip(documents, texts, followed, found, strict=True):
        follows = None if before is None else blocks[before]
        pin = pin_of(pinned, document, document.metadata)
        blocks.append(ContextBlock(text, id=document.id, score=score, pinned=pin, follows=follows))
    return blocks


def arrange(
    documents: Sequence[Document], plan: ContextPlan, shown_in: ShownIn, *, chosen: bool = False
) -> PromptDocuments:
    """Return copies in planned order; `plan` comes from `as_blocks(documents, shown_in)`.

    A full duplicate of another document is dropped. A document that shares only its text with another one follows
    after all planned ones, in relevance order. Documents without text keep their places, without a label. If several
    documents are references, the first one shows one sentence that names them all, and the others show nothing.

    Of `chosen` documents, those that share their text with another one or have none are left out, too.
    """
    is_labelled = has_labels(plan.annotation)
    copies: dict[int, Document] = {}
    for place, shown in _in_order(documents, plan):
        if chosen and place != shown[0].rank:
            continue
        document = documents[place]
        planned, text = shown
        if planned.reference is not None:
            copies[place] = _shown(document, REFERENCE_KEY, planned.block.text, text, shown_in)
            if is_labelled:
                copies[place].metadata.setdefault(LABEL_KEY, planned.label)
        elif is_labelled:
            copies[place] = _shown(document, LABEL_KEY, planned.label, text, shown_in)
        elif text != planned.block.text:
            copies[place] = _shown(document, ESCAPED_KEY, True, text, shown_in)
        else:
            copies[place] = document.model_copy(update={"metadata": _own_metadata(document)})
    if chosen and copies:
        left_out = [document for place, document in enumerate(documents) if place not in copies]
        return PromptDocuments(list(copies.values()), plan.order_annotation or "", left_out)
    with_text = {position for block in plan.blocks for position in block.positions}
    blank: dict[int, Document] = {}
    for place, document in enumerate(documents):
        if place not in with_text and document not in blank.values():
            blank[place] = document
    order = with_kept_places(list(copies), blank)
    copies |= {
        place: document.model_copy(update={"metadata": dict(document.metadata)}) for place, document in blank.items()
    }
    return PromptDocuments([copies[place] for place in order], plan.order_annotation or "")


def append_note(arranged: PromptDocuments, shown_in: ShownIn) -> list[Document]:
    """Append the note to the last document that shows text, and return the documents.

    A blank line separates the two. Changes the list and its last document.
    """
    documents, note, _ = arranged
    if not note:
        return documents
    texts = [
        str(document.metadata.get(TEXT_KEY, document.page_content)) if shown_in == "prompt" else document.page_content
        for document in documents
    ]
    last = max(i for i, text in enumerate(texts) if text.strip())
    noted = f"{texts[last]}\n\n{note}"
    if shown_in == "prompt":
        documents[last].metadata[TEXT_KEY] = noted
        documents[last].metadata.setdefault(NOTE_KEY, note)
    else:
        documents[last] = documents[last].model_copy(update={"page_content": noted})  # the class may be frozen
    return documents


def _in_order(documents: Sequence[Document], plan: ContextPlan) -> Iterator[tuple[int, tuple[PlannedBlock, str]]]:
    """Yield the place of each document with its block and the text that the prompt shows."""
    repeats: list[tuple[int, tuple[PlannedBlock, str]]] = []
    for planned, shown in zip(plan.blocks, plan.paragraphs(), strict=True):
        kept = [documents[planned.rank]]
        yield planned.rank, (planned, shown)
        for position in planned.positions[1:]:
            if documents[position] not in kept:
                kept.append(documents[position])
                repeats.append((position, (planned, shown if planned.reference is None else "")))
    yield from sorted(repeats, key=lambda repeat: repeat[0])


def _prompt_text(document: Document) -> str:
    """Return the text that prompts show: the application's own metadata entry comes before the document's text."""
    return str(_own_metadata(document).get(TEXT_KEY, document.page_content))


def _shown(document: Document, key: str, value: object, text: str, shown_in: ShownIn) -> Document:
    """Return a copy with this text where `shown_in` puts it, and a metadata entry that gives the reason."""
    metadata = {key: value, **_own_metadata(document)}  # the application's own entry of that name wins
    update: dict[str, Any] = {"metadata": metadata}
    if shown_in == "prompt":
        metadata[TEXT_KEY] = text
    else:
        update["page_content"] = text
    return document.model_copy(update=update)


def _own_metadata(document: Document) -> dict[str, Any]:
    """Return a copy of the metadata without the label, the escapes and the note of an earlier plan.

    Forged entries gain nothing: the text is then the `page_content`, or an entry that prompts would show anyway.
    """
    metadata = dict(document.metadata)
    label, note, text = metadata.get(LABEL_KEY), metadata.get(NOTE_KEY), metadata.get(TEXT_KEY)
    if not isinstance(text, str):
        return metadata
    if isinstance(note, str) and text.endswith(f"\n\n{note}"):
        del metadata[NOTE_KEY]
        metadata[TEXT_KEY] = text = text.removesuffix(f"\n\n{note}")
        if text == document.page_content:
            del metadata[TEXT_KEY]
    if metadata.get(REFERENCE_KEY) == document.page_content:
        for key in (REFERENCE_KEY, LABEL_KEY, TEXT_KEY):
            metadata.pop(key, None)
    elif isinstance(label, str) and f"[{label}]" in text:
        del metadata[LABEL_KEY]
        metadata.pop(TEXT_KEY, None)
    if metadata.get(ESCAPED_KEY) is True:
        del metadata[ESCAPED_KEY]
        metadata.pop(TEXT_KEY, None)
    return metadata
