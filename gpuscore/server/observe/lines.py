"""The log line of a finished request."""

import msgspec

from gpuscore.log import timestamp
from gpuscore.server.observe.record import STAGES, RequestRecord

SHOWN_TENANT = 8  # hex digits of the key's hash


def request_line(record: RequestRecord) -> bytes:
    """Return a finished request as one line of JSON, with its line end."""
    tenant = record.tenant[:SHOWN_TENANT] if record.tenant else None
    fields: dict[str, str | float | None] = {
        "time": timestamp(),
        "level": "error" if record.status >= 500 else "info",
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
