"""The numbers of `warmprefix plan-batch` are those of an engine that serves its orders."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from warmprefix.annotate import Annotation, Templates
from warmprefix.tokens import order_note
