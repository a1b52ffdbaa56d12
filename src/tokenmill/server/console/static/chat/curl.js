// A request as a command line. The key stays out of it.

import { hasKey, urlOf } from "../lib/api.js";

export function curl(path, body) {
  const lines = [`curl ${quote(urlOf(path))} \\`];
  if (hasKey()) lines.push("  -H \"Authorization: Bearer $TOKENMILL_API_KEY\" \\");
  lines.push("  -H 'Content-Type: application/json' \\", `  -d ${quote(JSON.stringify(body, null, 2))}`);
  return lines.join("\n");
}

function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
