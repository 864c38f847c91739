"""The side of `peer.Peer` that runs in the other engine's environment: standard library only."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from spent import spent

# Takes the requests of a job, each (query, items), and one of the engine's ways; returns the
# labels' log-probabilities of every item, request by request.
Score = Callable[[list[Any], str], list[list[list[float]]]]


def answer_jobs(load: Callable[[dict[str, Any]], tuple[Score, Callable[[], None]]]) -> None:
    """Load the engine with the settings on the first line, then answer each further line.

    `load` returns what scores, and what forgets the tokens of earlier jobs; the latter's time does
    not count.
    """
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        score, forget = load(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            job = json.loads(line)
            rows: list[list[list[float]]] = []
            forget()
            taken = spent(
                lambda job=job, rows=rows: rows.extend(score(job["requests"], job["way"]))
            )
            answers.write(json.dumps({"rows": rows, "spent": [taken.wall, taken.cpu]}) + "\n")
