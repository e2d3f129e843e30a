"""The process of llama.cpp's own server. `LocalModel` starts this file by its path; it imports nothing of warmprefix.

It prints the server's URL, and ends when its standard input does: with the process that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def main(options: dict[str, Any]) -> None:
    """Serve a model until standard input ends."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to the log
    xllamacpp: Any = import_module("xllamacpp")  # its names are those of a compiled module

    parameters = xllamacpp.CommonParams()
    parameters.model.path = options["gguf"]
    parameters.model_alias = {options["model"]}
    parameters.n_parallel = options["slots"]
    parameters.n_ctx = options["slots"] * options["context"]
    parameters.cache_ram_mib = options["host_memory_mib"]
    parameters.chat_template = options["chat_template"]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options["threads"]
    parameters.n_gpu_layers = 0  # the same on each machine
    parameters.fit_params = False  # it would choose another context size where memory is short
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0  # 0 takes a free port
    parameters.cors_origins = "http://127.0.0.1"  # no page of a browser may read it
    parameters.ui = False
    parameters.endpoint_metrics = parameters.endpoint_slots = True
    parameters.verbosity = 2  # errors and warnings
    server = xllamacpp.Server(parameters)
    print(server.listening_address, file=answer, flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for requests that are being answered


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
