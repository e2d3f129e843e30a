"""Emulated engines in a process of their own, for `agent_http.py`, until it is killed or its input ends.

python benchmarks/agent_servers.py COUNT KV_BLOCKS
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer


def main() -> None:
    count, kv_blocks = map(int, sys.argv[1:])
    config = EmulatorConfig(kv_blocks=kv_blocks, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with ExitStack() as stack:
        servers = [stack.enter_context(EmulatorServer(config)) for _ in range(count)]
        print(json.dumps([server.base_url for server in servers]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
