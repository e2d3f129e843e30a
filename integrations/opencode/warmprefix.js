// Sends the requests of one OpenCode provider through a warmprefix gateway, with the session's id and the application's
// name. A request that finds no gateway goes to the provider's own address. Options, or variables of the environment:
// `provider` or WARMPREFIX_PROVIDER, by default that of the model in opencode.json; `gateway` or WARMPREFIX_GATEWAY.

const PROBE_MS = 2000;

export const WarmprefixPlugin = async (_input, options) => {
  const gateway = (options?.gateway ?? process.env.WARMPREFIX_GATEWAY ?? "http://127.0.0.1:8080").replace(/\/+$/, "");
  let id = options?.provider ?? process.env.WARMPREFIX_PROVIDER;
  let isUsed = false;
  let isWarned = false;

  const isThere = () => fetch(`${gateway}/health`, { signal: AbortSignal.timeout(PROBE_MS) }).then(() => true, () => false);

  const withoutNames = (init) => {
    if (!init?.headers) {
      return init;
    }
    const headers = new Headers(init.headers);
    headers.delete("x-session-id");
    headers.delete("x-warmprefix-application");
    return { ...init, headers };
  };

  const throughGateway = (own, send) => async (url, init) => {
    const path = String(url);
    if (!path.startsWith(`${own}/`)) {
      return send(url, withoutNames(init));
    }
    try {
      const answer = await send(`${gateway}/v1${path.slice(own.length)}`, init);
      isWarned = false;
      return answer;
    } catch (error) {
      if (init?.signal?.aborted || (await isThere())) {
        throw error; // a gateway that is there may have asked the engine: it is not for us to ask again
      }
      const answer = await send(url, withoutNames(init));
      if (!isWarned) {
        isWarned = true;
        console.warn(`warmprefix: no gateway at ${gateway}, so ${id} is asked without it`);
      }
      return answer;
    }
  };

  return {
    config: async (config) => {
      id ??= config?.model?.split("/")[0];
      const provider = config?.provider?.[id];
      const own = provider?.options?.baseURL?.replace(/\/+$/, "");
      if (!own) {
        console.warn(`warmprefix: the provider ${id} has no address in opencode.json, so nothing changes`);
        return;
      }
      provider.options.fetch = throughGateway(own, provider.options.fetch ?? fetch);
      isUsed = true;
    },
    "chat.headers": async (input, output) => {
      if (isUsed && output?.headers && [input?.provider?.info?.id, input?.model?.providerID].includes(id)) {
        output.headers["x-session-id"] = input.sessionID;
        output.headers["x-warmprefix-application"] = "OpenCode";
      }
    },
  };
};
