"""From a request to its plan: a checked draft with labels, then the planned order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, get_args

from warmprefix.annotate import Annotate
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, evidence_blocks, joined_blocks, pins
from warmprefix.errors import check_names
from warmprefix.history import Message, VisibleHistory, shown_labels
from warmprefix.labels import lasting_labels
from warmprefix.ordering import BlockView, PrefixView
from warmprefix.ordering.runs import Runs
