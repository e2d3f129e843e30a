"""Documents in, planned documents out: copies that a prompt shows labelled, and the note that goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from warmprefix import ContextBlock, ContextPlan, PlannedBlock

__all__ = ["LABEL_KEY", "TEXT_KEY", "Annotate", "Arranged", "arrange", "as_blocks", "as_list", "note_in_last"]

Annotate = Literal["prompt", "content", "none"]
"""Where a document shows its label: in prompts only, in its own text, or nowhere."""

LABEL_KEY = "context_label"
TEXT_KEY = "page_content"
"""A metadata entry of this name is what `format_document` prints in place of the document's own text."""


class Arranged(NamedTuple):
    """Documents in planned order, and the order note: empty where there is none, or no label for it to name."""

    documents: list[Document]
    note: str


def as_list(documents: Iterable[Document]) -> list[Document]:
    """What was retrieved, unless it is a mistake of the chain's: its single parts must not pass for documents.

    Raises:
        TypeError: `documents` is one text, document or dict, or nothing that can be listed.
    """
    if isinstance(documents, str | Mapping | Document) or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be a sequence of Document, got one {type(documents).__name__}")
    return list(documents)


def as_blocks(documents: Sequence[Document], annotate: Annotate) -> list[ContextBlock]:
    """A block a document, whose text is what the prompt would show of it."""
    return [ContextBlock(_shown(document, annotate), id=document.id) for document in documents]


def arrange(documents: Sequence[Document], plan: ContextPlan, annotate: Annotate) -> Arranged:
    """Return copies in planned order; `plan` is one of `as_blocks(documents, annotate)`.

    A document that repeats another one altogether is left out. One that has only its text in common with another
    follows behind all planned ones, in relevance order, and so does one without a text, unlabelled. The first of the
    documents that are references shows the sentence that names all of them, the others show nothing.
    """
    copies = [_annotated(document, *shown, annotate) for shown, document in _in_order(documents, plan)]
    planned = {position for block in plan.blocks for position in block.positions}
    blank = [document for i, document in enumerate(documents) if i not in planned]
    distinct = [document for i, document in enumerate(blank) if document not in blank[:i]]
    copies += [document.model_copy(update={"metadata": dict(document.metadata)}) for document in distinct]
    return Arranged(copies, "" if annotate == "none" else plan.order_annotation or "")


def note_in_last(arranged: Arranged, annotate: Annotate) -> list[Document]:
    """Return the documents; the last one with a text shows the note too, after a blank line. Changes both."""
    documents, note = arranged
    if not note:
        return documents
    texts = [
        document.metadata.get(TEXT_KEY, "") if annotate == "prompt" else document.page_content for document in documents
    ]
    last = max(i for i, text in enumerate(texts) if str(text).strip())
    noted = f"{texts[last]}\n\n{note}"
    if annotate == "prompt":
        documents[last].metadata[TEXT_KEY] = noted
    else:
        documents[last] = documents[last].model_copy(update={"page_content": noted})  # it may be frozen
    return documents


def _in_order(documents: Sequence[Document], plan: ContextPlan) -> Iterator[tuple[tuple[PlannedBlock, str], Document]]:
    """Yield each document, with its block and what the prompt shows of it."""
    repeats: list[tuple[int, tuple[PlannedBlock, str]]] = []
    for planned, shown in zip(plan.blocks, plan.paragraphs(), strict=True):
        kept = [documents[planned.rank]]
        yield (planned, shown), kept[0]
        for position in planned.positions[1:]:
            if documents[position] not in kept:
                kept.append(documents[position])
                repeats.append((position, (planned, shown if planned.reference is None else "")))
    for position, repeat in sorted(repeats, key=lambda repeat: repeat[0]):
        yield repeat, documents[position]


def _shown(document: Document, annotate: Annotate) -> str:
    """An application may have put a text of its own in the metadata; then that is what its prompts show."""
    if annotate == "content" or _labelled_before(document):
        return document.page_content
    return str(document.metadata.get(TEXT_KEY, document.page_content))


def _annotated(document: Document, planned: PlannedBlock, shown: str, annotate: Annotate) -> Document:
    metadata = {LABEL_KEY: planned.label, **document.metadata}  # an application's own entry of that name stays
    if _labelled_before(document):
        metadata[LABEL_KEY] = planned.label
        del metadata[TEXT_KEY]  # with another prompt's label, and perhaps its note
    update: dict[str, Any] = {"metadata": metadata}
    if annotate == "prompt":
        metadata[TEXT_KEY] = shown
    elif annotate == "content":
        update["page_content"] = shown
    return document.model_copy(update=update)


def _labelled_before(document: Document) -> bool:
    """Whether the entries of our names are ours. Nobody gains by forging them: the text is rendered anew."""
    label, text = document.metadata.get(LABEL_KEY), document.metadata.get(TEXT_KEY)
    return isinstance(label, str) and isinstance(text, str) and f"[{label}]" in text
