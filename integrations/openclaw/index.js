// A provider of OpenClaw that asks a warmprefix gateway, with the session's id and the application's name in each
// request. While no gateway answers, its catalog is empty, and OpenClaw goes on with the model's fallbacks.

const ID = "warmprefix";
const PROBE_MS = 2000;

function gatewayOf(api) {
  const given = api.pluginConfig?.gateway ?? process.env.WARMPREFIX_GATEWAY ?? "http://127.0.0.1:8080";
  return given.replace(/\/+$/, "");
}

async function modelIds(gateway, apiKey) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  const answer = await fetch(`${gateway}/v1/models`, { headers, signal: AbortSignal.timeout(PROBE_MS) });
  if (!answer.ok) {
    throw new Error(`status ${answer.status}`);
  }
  return (await answer.json()).data.map((model) => model.id);
}

export default {
  id: ID,
  name: ID,
  description: "Models behind a warmprefix gateway",
  register(api) {
    const gateway = gatewayOf(api);
    const model = (id) => ({
      id,
      name: id,
      reasoning: false,
      input: ["text"],
      cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
      contextWindow: api.pluginConfig?.contextWindow ?? 131072,
      maxTokens: api.pluginConfig?.maxTokens ?? 8192,
    });
    let isWarned = false;
    const warn = (text) => {
      if (!isWarned) {
        isWarned = true;
        (api.logger?.warn ?? console.warn)(`warmprefix: ${text}`);
      }
    };
    let isThere = false;
    const ask = async (apiKey) => {
      try {
        const ids = await modelIds(gateway, apiKey);
        isThere = true;
        return ids;
      } catch (error) {
        isThere = false;
        warn(`no gateway at ${gateway} (${error.message}), so its models are left out`);
        return null;
      }
    };
    // Without a gateway there is no model: OpenClaw takes a fallback at once, and does not try to connect for minutes.
    const dynamicModel = (ctx) =>
      isThere ? { ...model(ctx.modelId), provider: ID, api: "openai-completions", baseUrl: `${gateway}/v1` } : undefined;
    if (typeof api.registerProvider !== "function") {
      warn("this version of OpenClaw takes no providers from plugins");
      return;
    }
    api.registerProvider({
      id: ID,
      label: ID,
      envVars: ["WARMPREFIX_API_KEY"],
      auth: [],
      resolveSyntheticAuth: () => ({ apiKey: process.env.WARMPREFIX_API_KEY ?? "none", source: ID, mode: "api-key" }),
      catalog: {
        order: "simple",
        run: async (ctx) => {
          const apiKey = ctx.resolveProviderApiKey?.(ID)?.apiKey ?? "none";
          const ids = await ask(apiKey);
          return ids && {
            provider: { baseUrl: `${gateway}/v1`, apiKey, api: "openai-completions", models: ids.map(model) },
          };
        },
      },
      prepareDynamicModel: async (ctx) => {
        await ask(process.env.WARMPREFIX_API_KEY);
        return dynamicModel(ctx);
      },
      resolveDynamicModel: dynamicModel,
      wrapStreamFn: (ctx) => {
        const inner = ctx.streamFn;
        if (!inner) {
          return undefined;
        }
        return (model, context, options) => {
          const named = { "x-warmprefix-application": "OpenClaw" };
          const session = options?.sessionId ?? ctx.sessionId;
          if (session) {
            named["x-session-id"] = session;
          }
          return inner(model, context, { ...options, headers: { ...options?.headers, ...named } });
        };
      },
    });
  },
};
