"""The replay's cache model against the emulator, token by token, on real text.

The same orders are served twice: as whole blocks in the model, and as tokens of real prompts in the emulator's
`PrefixCache`, which chains hashes as vLLM does and has no notion of blocks of text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
from openai import OpenAI

from warmprefix import ContextBlock
from warmprefix.annotate import Annotate, Templates
from warmprefix.labels import lasting_labels
from warmprefix.plan import Placement
from warmprefix.tokens import order_note
