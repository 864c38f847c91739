"""The host side of a server under load: CPU time of an answer, with a fake backend.

    python -P bench/serve.py
    python -P bench/serve.py --fake '{"token_us":20}' --devices cpu,cpu   # a simulated device

`gpuscore bench` times whole servers; this bench shows where the host's time goes. Every score is
compared with the oracle of fake.py. The exit code is 1 if a score is wrong or a request failed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import fake
from launch import Target, fake_server, serving
from report import keep, table

from gpuscore.measure.apis import APIS, LABELS
from gpuscore.measure.figures import PERCENTILES, Shot
from gpuscore.measure.load import Record
from gpuscore.measure.scenarios import SCENARIOS, BenchRequest, Draws, Shape, Way
from gpuscore.measure.targets import HttpTarget, meet

SHAPE = Shape(0, 120, 10, 18)
SCORE = APIS["score"]
ASKED = argparse.Namespace(api="score", served_model=None, vocab_size=fake.VOCAB, patience=60.0)


def main() -> int:
    options = arguments()
    rows = []
    queued = options.max_queued_requests
    command = fake_server(
        server={"max_inflight_per_key": 2 * queued},
        engine={"max_queued_requests": queued, "devices": options.devices},
        fake=json.loads(options.fake),
    )
    with serving(command) as target:
        url = f"http://{target.address[0]}:{target.address[1]}"
        http = meet("fake", url, None, ASKED)
        for clients in map(int, options.in_flight.split(",")):
            row = measure(http, target, clients, options.requests)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    print(f"\n{table(rows)}\n")
    keep("serve", {"bench": "serve", "options": vars(options), "rows": rows})
    return int(any(row["wrong"] or row["failed"] for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", default="1,8,64,256,1024", metavar="N,N")
    parser.add_argument("--requests", type=int, default=2000, help="of each row")
    parser.add_argument("--fake", default="{}", metavar="JSON", help="arguments of FakeBackend")
    parser.add_argument("--max-queued-requests", type=int, default=1024, help="of the server")
    parser.add_argument("--devices", default=None, help="one replica on each, such as cpu,cpu")
    return parser.parse_args()


def measure(http: HttpTarget, target: Target, clients: int, count: int) -> dict[str, Any]:
    """Send random requests; return rates, latencies and CPU time per answer."""
    way = Way("load", SHAPE, max(count, 2 * clients))
    seed = int(np.random.default_rng().integers(2**31))
    asks = Draws(seed, fake.VOCAB).requests(SCENARIOS["concurrency"], way, 0)
    before = target.cpu_by_kind()
    record = http.send(SCORE, asks, clients)
    used = {kind: after - before[kind] for kind, after in target.cpu_by_kind().items()}
    shot, micro = Shot.of(record, [len(ask.items) for ask in asks]), 1e6 / len(asks)
    return {
        "in flight": clients,
        "req/s": round(shot.requests / shot.seconds, 1),
        **{f"p{p} ms": round(float(np.percentile(shot.latencies, p)), 2) for p in PERCENTILES},
        "engine us": round(used["engine"] * micro),
        "http us": round(used["http"] * micro),
        "client us": round(record.client_seconds * micro),
        "server MiB": round(target.memory_mib()),
        "refused": shot.refused,
        "failed": int((~np.isin(record.status, (200, 429))).sum()),
        "wrong": wrong(asks, record),
    }


def wrong(asks: list[BenchRequest], record: Record) -> int:
    """Return the number of answers that differ from the oracle's, by more than rounding of exp."""
    count = 0
    for number in np.flatnonzero(record.status == 200).tolist():
        query, items = (
            np.array(x, dtype=np.int32) for x in (asks[number].query, asks[number].items)
        )
        expected = fake.oracle(query[None], items[None], LABELS)[0]
        try:
            got = SCORE.read(record.bodies[number], len(items))
            count += not np.allclose(got, expected, rtol=1e-12, atol=0)
        except (ValueError, KeyError, TypeError):
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
