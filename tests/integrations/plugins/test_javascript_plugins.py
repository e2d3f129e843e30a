"""The plugins without Python: what their files declare, and what they do to a request, in Node where it is there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from warmprefix_gateway import GatewayOptions

PLUGINS = Path(__file__).parents[3] / "integrations"

OPENCODE = """
import { WarmprefixPlugin } from "./opencode/warmprefix.js";
const asked = [];
let isThere = process.argv[1] === "there";
globalThis.fetch = async (url, init) => {
  asked.push([String(url), Object.fromEntries(new Headers(init?.headers))]);
  if (!isThere && String(url).startsWith("http://127.0.0.1:8080")) { throw new TypeError("refused"); }
  if (init?.breaks && String(url).startsWith("http://127.0.0.1:8080/v1")) { throw new TypeError("reset"); }
  return url;
};
const config = {
  model: "vllm/qwen",
  provider: { vllm: { options: { baseURL: "http://vllm/v1/", apiKey: "k" } }, other: { options: { baseURL: "o" } } },
};
const hooks = await WarmprefixPlugin({}, undefined);
await hooks.config(config);
const sent = {};
for (const id of ["vllm", "other"]) {
  const output = { headers: { a: "b" } };
  await hooks["chat.headers"]({ sessionID: "ses_1", model: { providerID: id } }, output);
  sent[id] = output.headers;
}
const { fetch: ask, ...options } = config.provider.vllm.options;
const answers = [];
for (const url of ["http://vllm/v1/chat/completions", "http://vllm/v1/chat/completions", "http://elsewhere/v1"]) {
  answers.push(await ask(url, { headers: sent.vllm }));
}
isThere = !isThere;  // it ends, or it starts
answers.push(await ask("http://vllm/v1/chat/completions", { headers: sent.vllm }));
isThere = false;
const signal = AbortSignal.abort();
const left = await ask("http://vllm/v1/chat/completions", { signal }).catch((error) => error.message);
isThere = true;
const broken = await ask("http://vllm/v1/chat/completions", { breaks: true }).catch((error) => error.message);
const similar = await ask("http://vllm/v1beta/models", {});
const empty = await WarmprefixPlugin({});  // another version of OpenCode
await empty.config({});
await empty["chat.headers"]({}, {});
console.log(JSON.stringify({ options, other: config.provider.other, sent, asked, answers, left, broken, similar }));
"""

OPENCLAW = """
import plugin from "./openclaw/index.js";
globalThis.fetch = async (url, options) => {
  if (process.argv[1] !== "there") { throw new Error("refused"); }
  return { ok: true, json: async () => ({ data: [{ id: "qwen" }], key: options.headers.authorization }) };
};
let provider;
const warned = [];
const logger = { warn: (text) => warned.push(text) };
plugin.register({ registerProvider: (given) => { provider = given; }, logger, pluginConfig: {} });
plugin.register({ logger });  // another version of OpenClaw
const catalog = await provider.catalog.run({ resolveProviderApiKey: () => ({ apiKey: "k" }) });
await provider.catalog.run({});
const named = { modelId: "new" };
const dynamic = [await provider.prepareDynamicModel(named), provider.resolveDynamicModel(named)];
const stream = provider.wrapStreamFn({ streamFn: (model, context, options) => options.headers });
const headers = stream({}, {}, { sessionId: "main", headers: { a: "b" } });
const unnamed = stream({}, {}, undefined);
console.log(JSON.stringify({ catalog, dynamic, headers, unnamed, warned, none: provider.wrapStreamFn({}) ?? null }));
"""


def run(program: str, argument: str) -> tuple[Any, str]:
    """Run a program in Node; return what it printed, and its warnings."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    command = [node, "--input-type=module", "--eval", program, argument]
    done = subprocess.run(command, cwd=PLUGINS, capture_output=True, text=True, check=True, env={})
    return json.loads(done.stdout), done.stderr


OWN, THROUGH = "http://vllm/v1/chat/completions", "http://127.0.0.1:8080/v1/chat/completions"


def test_opencodes_provider_goes_through_the_gateway_until_it_ends() -> None:
    result, warnings = run(OPENCODE, "there")
    assert result["options"] == {"baseURL": "http://vllm/v1/", "apiKey": "k"}
    assert result["other"] == {"options": {"baseURL": "o"}}
    named = {"x-session-id": "ses_1", "x-warmprefix-application": "OpenCode"}
    assert result["sent"] == {"vllm": {"a": "b", **named}, "other": {"a": "b"}}
    assert result["answers"] == [THROUGH, THROUGH, "http://elsewhere/v1", OWN]
    assert result["asked"][0] == [THROUGH, {"a": "b", **named}]
    assert result["asked"][5] == [OWN, {"a": "b"}]  # no engine gets what is for the gateway
    assert result["asked"][2] == ["http://elsewhere/v1", {"a": "b"}]
    assert result["left"] == "refused"
    asked = [url for url, _ in result["asked"] if not url.endswith("/health")]
    assert asked[5:] == [THROUGH, THROUGH, result["similar"]]  # no request that broke is sent again
    assert result["broken"] == "reset"
    assert result["similar"] == "http://vllm/v1beta/models"
    assert warnings.count("no gateway at http://127.0.0.1:8080") == 1
    assert "the provider undefined has no address" in warnings  # of the configuration without one


def test_without_a_gateway_opencodes_provider_is_asked_itself_and_one_warning_says_so() -> None:
    result, warnings = run(OPENCODE, "absent")
    assert result["answers"] == [OWN, OWN, "http://elsewhere/v1", THROUGH]
    assert warnings.count("no gateway at http://127.0.0.1:8080") == 1


def test_openclaw_has_the_gateways_models() -> None:
    result, _ = run(OPENCLAW, "there")
    provider = result["catalog"]["provider"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://127.0.0.1:8080/v1", "k")
    assert [model["id"] for model in provider["models"]] == ["qwen"]
    assert [(model["id"], model["baseUrl"]) for model in result["dynamic"]] == [("new", "http://127.0.0.1:8080/v1")] * 2
    named = {"x-session-id": "main", "x-warmprefix-application": "OpenClaw"}
    assert result["headers"] == {"a": "b", **named}
    assert result["unnamed"] == {"x-warmprefix-application": "OpenClaw"}
    assert result["none"] is None
    assert len(result["warned"]) == 1  # of the version that takes no providers


def test_without_a_gateway_openclaw_has_no_such_models_and_one_warning_says_so() -> None:
    result, _ = run(OPENCLAW, "absent")
    assert result["catalog"] is None
    assert result["dynamic"] == [None, None]  # so that a fallback is taken at once
    assert len([text for text in result["warned"] if "no gateway at http://127.0.0.1:8080" in text]) == 1


def test_openclaws_command_selects_the_gateways_model_and_removes_it_again(tmp_path: Path) -> None:
    stand_in = f'echo "$*" >> {tmp_path}/asked\ncase "$*" in *status*) cat {tmp_path}/model ;; esac'
    (tmp_path / "openclaw").write_text(f"#!/bin/sh\n{stand_in}\n")
    (tmp_path / "openclaw").chmod(0o755)

    def asked(model: str, *arguments: str) -> list[str]:
        (tmp_path / "asked").write_text("")
        (tmp_path / "model").write_text(model)
        env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": f"{tmp_path}/a home"}
        command: list[str | Path] = [PLUGINS / "openclaw" / "warmprefix-plugin", *arguments]
        subprocess.run(command, env=env, capture_output=True, check=True)
        return [line for line in (tmp_path / "asked").read_text().splitlines() if not line.endswith("--plain")]

    install = f"plugins install --force --accept-capabilities {PLUGINS / 'openclaw'}"
    own = "models fallbacks add vllm/org/qwen"
    through = "warmprefix/org/qwen"
    assert asked("vllm/org/qwen", "install", "glm") == [install, "models set warmprefix/glm", own]
    assert asked("vllm/org/qwen", "install") == [install, f"models set {through}", own]
    assert asked(through, "install") == [install]
    removed = ["models fallbacks remove vllm/org/qwen", "plugins uninstall --force warmprefix"]
    assert asked(through, "remove") == ["models set vllm/org/qwen", *removed]
    asked("vllm/org/qwen", "install")
    assert asked("b/chosen", "remove") == removed  # what was selected since then stays
    assert [*(tmp_path / "a home" / ".openclaw").iterdir()] == []
    assert asked("b/chosen", "remove") == removed[1:]


def test_the_files_of_the_packages_agree() -> None:
    package = json.loads((PLUGINS / "openclaw" / "package.json").read_text())
    manifest = json.loads((PLUGINS / "openclaw" / "openclaw.plugin.json").read_text())
    assert package["openclaw"]["providers"] == manifest["providers"] == [manifest["id"]] == ["warmprefix"]
    for folder in ("openclaw", "opencode"):
        package = json.loads((PLUGINS / folder / "package.json").read_text())
        assert (PLUGINS / folder / package["main"]).exists()
        assert "dependencies" not in package


@pytest.mark.parametrize("path", ["openclaw/index.js", "opencode/warmprefix.js", "claude_code/claude-warmprefix"])
def test_each_plugin_knows_where_a_gateway_listens(path: str) -> None:
    assert f"http://127.0.0.1:{GatewayOptions(('http://127.0.0.1:9',)).port}" in (PLUGINS / path).read_text()


@pytest.mark.parametrize("is_there", [True, False])
def test_claude_code_starts_with_and_without_a_gateway(tmp_path: Path, is_there: bool) -> None:
    for name, text in (
        ("curl", f"exit {0 if is_there else 7}"),
        ("claude", 'echo "$ANTHROPIC_BASE_URL $CLAUDE_CODE_ATTRIBUTION_HEADER $*"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [PLUGINS / "claude_code" / "claude-warmprefix", "-p", "two words"],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "WARMPREFIX_GATEWAY": "http://gateway:1/"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ("http://gateway:1 0 -p two words" if is_there else "-p two words")
    assert done.stderr.count("no gateway at http://gateway:1,") == (0 if is_there else 1)
