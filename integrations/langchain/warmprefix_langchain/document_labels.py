"""Documents as context blocks, and plans as labelled copies of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from warmprefix import ContextBlock, ContextPlan, PlannedBlock

__all__ = ["LABEL_KEY", "TEXT_KEY", "Annotate", "PromptDocuments", "append_note", "arrange", "as_blocks", "as_list"]

Annotate = Literal["prompt", "content", "none"]
"""Where a document shows its label: in prompts only, in its own text, or nowhere."""

LABEL_KEY = "context_label"
TEXT_KEY = "page_content"
"""`format_document` prints a metadata entry of this name in place of the document's own text."""


class PromptDocuments(NamedTuple):
    """Documents in planned order, and the order note."""

    documents: list[Document]
    note: str
    """Empty if the order did not change, or if no labels are shown."""


def as_list(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a new list.

    A single text, document or dict is refused: it would pass for a sequence of its parts.

    Raises:
        TypeError: `documents` is not a sequence of documents.
    """
    if isinstance(documents, str | Mapping | Document) or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be a sequence of Document, got one {type(documents).__name__}")
    return list(documents)


def as_blocks(documents: Sequence[Document], annotate: Annotate) -> list[ContextBlock]:
    """Return one block per document, with the text that the prompt would show."""
    return [ContextBlock(_shown_text(document, annotate), id=document.id) for document in documents]


def arrange(documents: Sequence[Document], plan: ContextPlan, annotate: Annotate) -> PromptDocuments:
    """Return copies in planned order; `plan` comes from `as_blocks(documents, annotate)`.

    A full duplicate of another document is dropped. A document that shares only its text with another one follows
    after all planned ones, in relevance order. Documents without text come last, without a label. If several documents
    are references, the first one shows one sentence that names them all, and the others show nothing.
    """
    copies = [_annotated(document, *shown, annotate) for shown, document in _in_order(documents, plan)]
    planned = {position for block in plan.blocks for position in block.positions}
    blank = [document for i, document in enumerate(documents) if i not in planned]
    distinct = [document for i, document in enumerate(blank) if document not in blank[:i]]
    copies += [document.model_copy(update={"metadata": dict(document.metadata)}) for document in distinct]
    return PromptDocuments(copies, "" if annotate == "none" else plan.order_annotation or "")


def append_note(arranged: PromptDocuments, annotate: Annotate) -> list[Document]:
    """Append the note to the last document that shows text, and return the documents.

    A blank line separates the two. Changes the list and its last document.
    """
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
        documents[last] = documents[last].model_copy(update={"page_content": noted})  # the class may be frozen
    return documents


def _in_order(documents: Sequence[Document], plan: ContextPlan) -> Iterator[tuple[tuple[PlannedBlock, str], Document]]:
    """Yield each document with its block and the text that the prompt shows."""
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


def _shown_text(document: Document, annotate: Annotate) -> str:
    """Return the text that prompts show: the application's own metadata entry comes before the document's text."""
    if annotate == "content" or _is_labelled(document):
        return document.page_content
    return str(document.metadata.get(TEXT_KEY, document.page_content))


def _annotated(document: Document, planned: PlannedBlock, shown: str, annotate: Annotate) -> Document:
    """Return a copy with a label, and with the shown text where `annotate` puts it."""
    metadata = {LABEL_KEY: planned.label, **document.metadata}  # the application's own entry of that name wins
    if _is_labelled(document):
        # These entries come from an earlier plan: another label, and perhaps another note.
        metadata[LABEL_KEY] = planned.label
        del metadata[TEXT_KEY]
    update: dict[str, Any] = {"metadata": metadata}
    if annotate == "prompt":
        metadata[TEXT_KEY] = shown
    elif annotate == "content":
        update["page_content"] = shown
    return document.model_copy(update=update)


def _is_labelled(document: Document) -> bool:
    """Return whether an earlier plan labelled the document.

    Forged entries gain nothing: the text is rendered again from `page_content`.
    """
    label, text = document.metadata.get(LABEL_KEY), document.metadata.get(TEXT_KEY)
    return isinstance(label, str) and isinstance(text, str) and f"[{label}]" in text
