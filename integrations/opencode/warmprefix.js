// Sends the requests of one OpenCode provider through a warmprefix gateway, with the session's id and the application's
// name. If no gateway answers at the start, the provider keeps its own address. Options, or variables of the environment:
// `provider` or WARMPREFIX_PROVIDER, by default that of the model in opencode.json; `gateway` or WARMPREFIX_GATEWAY.

const PROBE_MS = 2000;

async function answers(gateway) {
  try {
    return (await fetch(`${gateway}/health`, { signal: AbortSignal.timeout(PROBE_MS) })).ok;
  } catch {
    return false;
  }
}

export const WarmprefixPlugin = async (_input, options) => {
  const gateway = (options?.gateway ?? process.env.WARMPREFIX_GATEWAY ?? "http://127.0.0.1:8080").replace(/\/+$/, "");
  let id = options?.provider ?? process.env.WARMPREFIX_PROVIDER;
  let isUsed = false;
  return {
    config: async (config) => {
      id ??= config?.model?.split("/")[0];
      const provider = config?.provider?.[id];
      if (!provider?.options?.baseURL) {
        console.warn(`warmprefix: the provider ${id} has no address in opencode.json, so nothing changes`);
      } else if (!(await answers(gateway))) {
        console.warn(`warmprefix: no gateway at ${gateway}, so ${id} is asked without it`);
      } else {
        provider.options = { ...provider.options, baseURL: `${gateway}/v1` };
        isUsed = true;
      }
    },
    "chat.headers": async (input, output) => {
      if (isUsed && output?.headers && [input?.provider?.info?.id, input?.model?.providerID].includes(id)) {
        output.headers["x-session-id"] = input.sessionID;
        output.headers["x-warmprefix-application"] = "OpenCode";
      }
    },
  };
};
