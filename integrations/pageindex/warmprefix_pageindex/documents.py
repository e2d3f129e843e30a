"""Documents of a PageIndex client as parts of a prompt that stay the same from question to question."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from warmprefix import ContextBlock

__all__ = ["DocumentClient", "node_blocks", "tree_instructions"]

_INTRODUCTION = (
    "The structures of documents, as get_document_structure() returns them. Do not call it for these documents: pick "
    "the pages here, and read them with get_page_content()."
)
_STRUCTURE = "get_document_structure"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:/-]+")
_MAX_NAME = 32
"""Characters of a document's name in a block's id, which is the label only if it is short."""


class DocumentClient(Protocol):
    """What is used of `pageindex.PageIndexClient`, with local documents or those of the cloud."""

    def get_document(self, doc_id: str) -> dict[str, Any]:
        """Return the metadata of a document, with its `name`."""
        ...

    def get_document_structure(self, doc_id: str) -> list[dict[str, Any]]:
        """Return the tree of a document, without texts."""
        ...

    def get_page_content(self, doc_id: str, pages: str) -> list[dict[str, Any]]:
        """Return pages with their `page_index` and `markdown`."""
        ...

    def agent_tools(self) -> list[Callable[..., str]]:
        """Return the tools of an agent as functions."""
        ...


def tree_instructions(client: DocumentClient, doc_id: str | Sequence[str]) -> str:
    """Return the trees of documents, for the system prompt: parents before children, as PageIndex's own tool has them.

    Otherwise the model asks for the same tree in each conversation, behind a question that no other one has, so no
    cache holds it. In front of all questions it is computed once, and each conversation takes one call less.

        answer = client.chat(question, doc_id=doc_id, instructions=tree_instructions(client, doc_id))

    The order of the documents does not depend on the order of `doc_id`. A tree that the tool returns in several parts
    is left to the tool, as is one that is not ready yet, and those of two documents with one name.

    Args:
        client: A PageIndex client.
        doc_id: The documents, as for `chat`.

    Returns:
        The same bytes for the same documents; an empty text if no tree can stand in front.

    Raises:
        pageindex.PageIndexAPIError: A document does not exist, or PageIndex can't be reached.
    """
    doc_ids = [doc_id] if isinstance(doc_id, str) else sorted(set(doc_id))
    names = [client.get_document(one)["name"] for one in doc_ids]
    tool = next((tool for tool in client.agent_tools() if tool.__name__ == _STRUCTURE), None)
    # The tool finds a document by its name, so it cannot show two of one name.
    shown = [tool(doc_name=name) for name in names if names.count(name) == 1] if tool is not None else []
    trees = [text for text in shown if _is_whole_tree(text)]
    return "\n\n".join([_INTRODUCTION, *trees]) if trees else ""


def node_blocks(client: DocumentClient, doc_id: str, node_ids: Iterable[str]) -> list[ContextBlock]:
    """Return the pages of nodes as context blocks, each page once.

    For applications that let a model pick nodes of the tree, and put their texts into a prompt themselves. Nodes share
    pages with their parents and neighbours, so not the node but the page is what comes again, in this prompt and in
    others. With a `conversation`, the planner also leaves out pages that its prompt holds already.

        plan = planner.plan(node_blocks(client, doc_id, picked), conversation="chat-42", placement="tail")

    Args:
        client: A PageIndex client.
        doc_id: A document.
        node_ids: Ids of its nodes, the most relevant first. Pages follow that order; pages of one run stay together.

    Raises:
        ValueError: The document has no such node.
        pageindex.PageIndexAPIError: The document does not exist, or PageIndex can't be reached.
    """
    ranges = _page_ranges(client.get_document_structure(doc_id))
    picked = list(node_ids)
    if unknown := [node for node in picked if node not in ranges]:
        raise ValueError(f"node_ids must be nodes of document {doc_id!r}, got {', '.join(map(repr, unknown))}")
    numbers = list(dict.fromkeys(page for node in picked for page in ranges[node]))
    if not numbers:
        return []
    name = _UNSAFE.sub("_", client.get_document(doc_id)["name"])[-_MAX_NAME:].lstrip("_.:/-")
    found = client.get_page_content(doc_id, ",".join(map(str, numbers)))
    texts = {page["page_index"]: page.get("markdown") or "" for page in found}
    blocks: list[ContextBlock] = []
    before: int | None = None
    for number in numbers:
        if texts.get(number, "").strip():
            follows = blocks[-1] if blocks and before == number - 1 else None
            is_other = follows is None or follows.text != texts[number]
            blocks.append(ContextBlock(texts[number], id=f"{name}:{number}", follows=follows if is_other else None))
            before = number
    return blocks


def _is_whole_tree(text: str) -> bool:
    try:
        shown = json.loads(text)
    except ValueError:
        return False
    return isinstance(shown, dict) and bool(shown.get("structure")) and "pagination" not in shown


def _page_ranges(tree: Sequence[dict[str, Any]]) -> dict[str, range]:
    """Return the pages of each node."""
    ranges: dict[str, range] = {}
    waiting = list(tree)
    while waiting:
        node = waiting.pop()
        first, last = node.get("start_index"), node.get("end_index")
        if isinstance(first, int) and isinstance(last, int) and node.get("node_id") is not None:
            ranges[node["node_id"]] = range(first, last + 1)
        waiting.extend(node.get("nodes") or ())
    return ranges
