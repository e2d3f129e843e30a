"""Write the results of the working tree in place of the committed ones: `python tests/frozen/write.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["WRITE_FROZEN"] = "1"
    sys.exit(pytest.main(["-q", str(Path(__file__).parent), *sys.argv[1:]]))
