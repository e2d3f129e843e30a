"""PageIndex plugins: documents' trees in front of the questions, and each page once."""

from warmprefix_pageindex.documents import node_blocks, tree_instructions
from warmprefix_pageindex.shown_pages import pages_once

__all__ = ["node_blocks", "pages_once", "tree_instructions"]
