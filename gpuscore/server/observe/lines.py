"""The log line of a finished request, as JSON or as text."""

import msgspec

from gpuscore.dialects.paths import PROBE_PATHS
from gpuscore.system.log import LogFormat, clock_time, timestamp
from gpuscore.types.record import STAGES, RequestRecord

SHOWN_TENANT = 8  # hex digits of the key's hash


def request_line(record: RequestRecord, style: LogFormat = "json") -> bytes:
    """Return a finished request as one line, with its line end."""
    return _text(record) if style == "text" else _json(record)


def _text(record: RequestRecord) -> bytes:
    """Return the time of day, route, status, milliseconds, and what is known of sizes and errors.

    The id is left out of answers that succeeded: people read these lines as they pass.
    """
    parts = [f"{clock_time()} {record.method} {record.route} {record.status}"]
    parts += [record.code] if record.code else []
    parts.append(f"{1000 * record.seconds:.1f} ms")
    if record.items is not None:
        parts.append(_counted(record.items, "item"))
    if record.prompt_tokens is not None:
        cached = f", {record.cached_tokens:,} of them cached" if record.cached_tokens else ""
        parts.append(_counted(record.prompt_tokens, "token") + cached)
    if record.status >= 400:
        parts.append(f"id {record.request_id}")
    return "  ".join(parts).encode() + b"\n"


def _level(record: RequestRecord) -> str:
    # A probe's 503 is what it asks for; what makes a server unhealthy has a line of its own.
    asked = record.status == 503 and record.route in PROBE_PATHS
    return "error" if record.status >= 500 and not asked else "info"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _json(record: RequestRecord) -> bytes:
    tenant = record.tenant[:SHOWN_TENANT] if record.tenant else None
    fields: dict[str, str | float | None] = {
        "time": timestamp(),
        "level": _level(record),
        "event": "request",
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "code": record.code or None,
        "tenant": tenant,
        "model": record.model or None,
        "items": record.items,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
    }
    for name in STAGES:
        stage = record.stages.get(name)
        fields[f"{name}_ms"] = None if stage is None else round(1000 * stage[1], 3)
    fields["total_ms"] = round(1000 * record.seconds, 3)
    fields["bytes_in"], fields["bytes_out"] = record.bytes_in, record.bytes_out
    return msgspec.json.encode(fields) + b"\n"
