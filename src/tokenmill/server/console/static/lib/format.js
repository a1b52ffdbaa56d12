// Numbers, times and sizes as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

export function whole(value) {
  return Number.isFinite(value) ? WHOLE.format(value) : NONE;
}

export function decimal(value, digits = 3) {
  if (!Number.isFinite(value)) return NONE;
  return Math.abs(value) >= 1000 ? WHOLE.format(value) : String(Number(value.toPrecision(digits)));
}

export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : NONE;
}

// Seconds as "12 ms", "1.23 s" or "2 min 3 s".
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size < 0.0995) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (size < 1) return `${Math.round(1000 * seconds)} ms`;
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  if (size < 3600) return parts(Math.round(seconds), 60, "min", "s");
  return parts(Math.round(seconds / 60), 60, "h", "min");
}

function parts(count, num, unit, part) {
  const rest = count % num;
  return `${Math.floor(count / num)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

export function bytes(size) {
  if (!Number.isFinite(size)) return NONE;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${decimal(size)} ${unit}`;
    size /= 1024;
  }
  return `${decimal(size)} TiB`;
}

// Seconds since 1970 as date and time where the reader is: 2026-01-31 09:30:00.
export function moment(seconds) {
  return Number.isFinite(seconds) && seconds > 0 ? new Date(1000 * seconds).toLocaleString("sv-SE") : NONE;
}

export function orNone(value) {
  return value === null || value === undefined || value === "" ? NONE : String(value);
}
