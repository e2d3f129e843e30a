"""Reading files of any kind and size in bounded memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools import inputs
from warmprefix_tools.inputs import InputError, opened

BOMB_BYTES = 300 * 1024 * 1024
MEMORY = 1024 * 1024 * 1024

READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
{imports}
try:
    read([sys.argv[1]])
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
DOCTOR = """
from pathlib import Path
from warmprefix_tools.doctor.log_reader import read_log
read = lambda p: read_log([Path(p[0])])
"""
TRACES = "from warmprefix_tools.traces.reader import read_trace; read = lambda p: read_trace(p[0])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory like this")
@pytest.mark.parametrize(
    ("imports", "start", "problem"),
    [
        (DOCTOR, b'{"messages": "', "DoctorError: {path}, line 2: longer than 67,108,864 bytes."),
        (DOCTOR, b'[{"messages": "', "DoctorError: {path}, line 2: a JSON value of more than 67,108,864 characters."),
        (TRACES, b'{"name": "', "TraceError: {path}, line 2: longer than 67,108,864 bytes"),
    ],
)
def test_gzip_bomb_is_refused_in_bounded_memory(tmp_path: Path, imports: str, start: bytes, problem: str) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"\n" + start)
        for _ in range(BOMB_BYTES // 2**20):
            file.write(b"x" * 2**20)
    program = READ.format(memory=MEMORY, imports=imports)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (problem.format(path=path), "")


def values(path: Path) -> list[tuple[int, object]]:
    with opened(path) as file:
        return list(file.json_values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    elements=st.lists(st.dictionaries(st.text(), JSON, max_size=3)),
    indent=st.none() | st.integers(0, 2),
    read=st.integers(1, 40),
)
def test_elements_of_an_array_are_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, elements: list[Any], indent: int | None, read: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "values.json"
    text = json.dumps(elements, indent=indent)
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_FIRST_READ", read)
        found = values(path)
    assert [value for _, value in found] == elements
    places = [number for number, _ in found]
    assert places == sorted(places)
    assert all(text.splitlines()[number - 1].lstrip().startswith(("{", "[")) for number in places)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[{"a": 1},\n{"a" 2}]', 2, "not JSON: Expecting ':' delimiter"),
        ('[{"a": 1}\n\n{"a": 2}]', 3, "expected a comma or a bracket, found '{'"),
        ('[{"a": 1},\n{"a": 2}', 2, "the JSON array has no end"),
        ('[{"a":\n"b', 2, "not JSON: Unterminated string"),
        ("[" + '{"a":[' * 100_000, 1, "nested too deeply"),
        ('[{"a": ' + "9" * 10_000 + "}]", 1, "not JSON that can be read"),
    ],
)
def test_bad_json_is_reported_with_its_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = tmp_path / "values.json"
    path.write_text(text)
    with pytest.raises(InputError, match=problem.replace("(", "[(]")) as caught:
        values(path)
    assert caught.value.line == line
